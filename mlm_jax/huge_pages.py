"""Huge pages for the memory that XLA's CPU backend allocates anew at every step."""

import os
import pathlib
import platform
import sys

NAME, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
KERNEL = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages():
    """Starts this very command again with huge pages, where the platform has them.

    A step on a CPU is 8% (BERT-base) to 18% (BERT-mini) faster. The C library reads
    its settings when a process starts, so it cannot be asked later.
    """
    if not are_asked_for() and can_be_asked_for():
        tunables = [os.environ[NAME]] if os.environ.get(NAME) else []
        os.environ[NAME] = ":".join([*tunables, VALUE])
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)


def are_asked_for():
    return "glibc.malloc.hugetlb" in os.environ.get(NAME, "")


def can_be_asked_for():
    """True under Linux with glibc 2.35 or later, unless the kernel never gives them."""
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return False
    return KERNEL.exists() and "[never]" not in KERNEL.read_text()
