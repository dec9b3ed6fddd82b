"""The system-call filter of the sandbox: what ordinary Python never asks for and a hostile program would."""

from __future__ import annotations

import platform
import struct

from .errors import InputError

__all__ = ["system_call_filter"]

# Classic BPF (Linux Documentation/networking/filter.rst): load word, jump if equal / at least / any bit set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_NEW_USER_NAMESPACE = 0x10000000
_X32_BIT = 0x40000000

# By machine: the audit architecture, clone, and the refused calls. They read or steer another process, make
# namespaces and mounts, hold memory that no limit counts (memfd, System V), or open wide parts of the kernel.
_MACHINES: dict[str, tuple[int, int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        56,
        {
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "ptrace": 101,
            "pivot_root": 155,
            "mount": 165,
            "umount2": 166,
            "add_key": 248,
        }
        | {"request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304}
        | {"setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319}
        | {"bpf": 321, "userfaultfd": 323},
    ),
    "aarch64": (
        0xC00000B7,
        220,
        {
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "unshare": 97,
            "ptrace": 117,
            "msgget": 186,
            "semget": 190,
            "shmget": 194,
        }
        | {
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "perf_event_open": 241,
            "open_by_handle_at": 265,
            "setns": 268,
        }
        | {"process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279, "bpf": 280}
        | {"userfaultfd": 282},
    ),
}
# Calls newer than 2018 have one number on every machine.
_NEWER = {"io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "fspick": 433}
_NEWER |= {"pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447}
_CLONE3 = 435


def system_call_filter(machine: str | None = None) -> bytes:
    """The filter as the kernel reads it: an array of ``struct sock_filter``.

    ``clone3`` is answered with "no such call", upon which the C library takes ``clone``, whose flags can be seen.

    Args:
        machine: as ``platform.machine()`` names it, the default.

    >>> len(system_call_filter("x86_64")) % 8, system_call_filter("x86_64") == system_call_filter("aarch64")
    (0, False)
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise InputError(f"engine=cpython: no system-call filter for {machine}; set engine=monty")
    arch, clone, older = _MACHINES[machine]
    program = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT)]
    program += [
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in (older | _NEWER).values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    program += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_ANY_BIT, 0, 1, _NEW_USER_NAMESPACE)]
    program += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)
