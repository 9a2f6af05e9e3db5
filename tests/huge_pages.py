"""Once imported, the memory of this process lies in huge pages: a fork of it takes half of the time.

The last thing that the server of ranks preloads (`ranks.py`). A fork copies an entry for each page that was written to:
60,000 for 250 MB, or 120. What is allocated later lies as ever. Where the system has no huge pages, nothing changes.
"""

import ctypes
from pathlib import Path

_SIZE, _COLLAPSE = 2 << 20, 25  # MADV_COLLAPSE

_libc = ctypes.CDLL(None)
for _line in Path("/proc/self/maps").read_text().splitlines():
    _span, _access, _, _, _inode, *_name = _line.split()
    if _access.startswith("rw") and _inode == "0" and _name in ([], ["[heap]"]):
        _start, _stop = (int(address, 16) for address in _span.split("-"))
        _start, _stop = -(-_start // _SIZE) * _SIZE, _stop // _SIZE * _SIZE
        if _start < _stop:
            _libc.madvise(ctypes.c_void_p(_start), ctypes.c_size_t(_stop - _start), _COLLAPSE)
