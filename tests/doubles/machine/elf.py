"""The smallest shared library that loads: one soname, functions that return a number.

So the real `ldconfig` caches the libraries of a driver double and the real loader calls into them. Layout: System V
ABI, AMD64 supplement; one segment that is read and executed holds everything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_HEADER, _PROGRAM, _SYMBOL, _ENTRY = 64, 56, 24, 16
_LOAD, _DYNAMIC = 1, 2
_NEEDED_TAGS = {"hash": 4, "strtab": 5, "symtab": 6, "strsz": 10, "syment": 11, "soname": 14}


def library(soname: str, functions: Mapping[str, int] | None = None) -> bytes:
    """An x86-64 shared object.

    Args:
        functions: exported name -> the int that it returns, whatever it is called with.
    """
    values = dict(functions or {})
    strings = b"\0" + soname.encode() + b"\0"
    name_at = {}
    for name in values:
        name_at[name] = len(strings)
        strings += name.encode() + b"\0"
    code, starts = b"", {}
    for name, value in values.items():
        starts[name] = len(code)
        code += b"\xb8" + struct.pack("<i", value) + b"\xc3"  # mov eax, value; ret
    symbols = 1 + len(values)
    table = struct.pack("<II", 1, symbols)  # one bucket: the chain is every symbol in turn
    table += struct.pack("<I", 1 if values else 0) + struct.pack("<I", 0)
    table += b"".join(struct.pack("<I", index + 1 if index < len(values) else 0) for index in range(1, symbols))
    at, layout = _HEADER + 2 * _PROGRAM, {}
    for part, size in (
        ("hash", len(table)),
        ("symtab", symbols * _SYMBOL),
        ("strtab", len(strings)),
        ("code", len(code)),
        ("dynamic", 7 * _ENTRY),
    ):
        at = (at + 7) // 8 * 8
        layout[part] = at
        at += size
    symtab = bytes(_SYMBOL) + b"".join(
        # global function, in a section that is defined (1: there is no section table to look it up in)
        struct.pack("<IBBHQQ", name_at[name], 0x12, 0, 1, layout["code"] + starts[name], 6)
        for name in values
    )
    tags = {**layout, "strsz": len(strings), "syment": _SYMBOL, "soname": 1}
    dynamic = b"".join(struct.pack("<QQ", number, tags[tag]) for tag, number in _NEEDED_TAGS.items()) + bytes(_ENTRY)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM, 2, 64, 0, 0)
    programs = struct.pack("<IIQQQQQQ", _LOAD, 7, 0, 0, 0, at, at, 0x1000)
    where = layout["dynamic"]
    programs += struct.pack("<IIQQQQQQ", _DYNAMIC, 6, where, where, where, len(dynamic), len(dynamic), 8)
    image = bytearray(at)
    for start, content in (
        (0, header + programs),
        (layout["hash"], table),
        (layout["symtab"], symtab),
        (layout["strtab"], strings),
        (layout["code"], code),
        (layout["dynamic"], dynamic),
    ):
        image[start : start + len(content)] = content
    return bytes(image)
