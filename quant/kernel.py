"""Kernels: built, compiled by LLVM at first use, kept on disk, called without the GIL.

The cache holds object code, one file per kernel, keyed by the sources of this package, the LLVM that compiled it and
the processor. Files are checked by their digest and written under a temporary name, so that any number of processes may
use the cache at once. `CONVERT_MTP_CACHE` moves it (default: `convert-mtp` in the user's cache folder).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from quant import llvm_lanes
from quant.lanes import WIDTH, Stored, Value, on

_I64 = ir.IntType(64)
_lock = threading.RLock()  # LLVM's context and the value builder are one per process


class Kernel:
    """A function over memory: `build(*memories, *sizes)` emits it and returns its int64 result.

    Called with one NumPy array per memory and one int per size, it compiles itself for the arrays' dtypes first.
    """

    def __init__(self, build: Callable[..., Value], memories: int, name: str | None = None) -> None:
        """`name` is part of the cache's key: kernels that share a builder need one of their own."""
        self.build, self.memories = build, memories
        self.name = name or f"{build.__module__}.{build.__qualname__}"
        self._compiled: dict[tuple[Stored, ...], Callable[..., int]] = {}

    def __call__(self, *args: Any) -> int:
        arrays, sizes = args[: self.memories], args[self.memories :]
        return self.raw(arrays, len(sizes))(*(a.ctypes.data for a in arrays), *sizes)

    def raw(self, arrays: Sequence[Any], sizes: int) -> Callable[..., int]:
        """The machine's function for arrays like these, which takes addresses: for many calls on parts of them."""
        stored: tuple[Stored, ...] = tuple(_STORED[a.dtype.str] for a in arrays)
        return self._compiled.get(stored) or self._compile(stored, sizes)

    def assembly(self, stored: tuple[Stored, ...], sizes: int) -> str:
        """What the processor runs."""
        with _lock:
            return _machine().emit_assembly(_optimized(self._module(stored, sizes)))

    def _compile(self, stored: tuple[Stored, ...], sizes: int) -> Callable[..., int]:
        with _lock:
            if stored not in self._compiled:
                file = _cache_folder() / f"{_key(self.name, stored)}.o"
                code = _read(file)
                if code is None:
                    code = _machine().emit_object(_optimized(self._module(stored, sizes)))
                    _write(file, code)
                self._compiled[stored] = _load(code, self.memories, sizes)
            return self._compiled[stored]

    def _module(self, stored: tuple[Stored, ...], sizes: int) -> ir.Module:
        module = ir.Module(self.name)
        module.triple = llvm.get_process_triple()
        pointers = [llvm_lanes.pointer_type(s) for s in stored]
        function = ir.Function(module, ir.FunctionType(_I64, pointers + [_I64] * sizes), "kernel")
        for argument in function.args[: len(stored)]:
            argument.add_attribute("noalias")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body = function.append_basic_block("body")  # variables and room gather in the entry
        builder.position_at_end(body)
        llvm_lanes.begin(builder)
        memories = [llvm_lanes.Array(a, s) for a, s in zip(function.args, stored, strict=False)]
        counts = [llvm_lanes.Register(a) for a in function.args[len(stored) :]]
        with on(llvm_lanes):
            builder.ret(llvm_lanes.position(self.build(*memories, *counts)).ir)
        builder.position_at_end(function.entry_basic_block)
        builder.branch(body)
        return module


def kernel(memories: int) -> Callable[[Callable[..., Value]], Kernel]:
    """Decorator: the function's first `memories` arguments are arrays, the others sizes."""
    return lambda build: Kernel(build, memories)


_STORED: dict[str, Stored] = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "|u1": "U8"}


@cache
def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    # No option here allows contraction: LLVM fuses only what asks for it.
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, codemodel="jitdefault"
    )


def _optimized(module: ir.Module) -> llvm.ModuleRef:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(_machine(), llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


_engines: list[llvm.ExecutionEngine] = []  # code lives as long as its engine


def _load(code: bytes, memories: int, sizes: int) -> Callable[..., int]:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _fresh_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    signature = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * memories, *[ctypes.c_int64] * sizes)
    return signature(engine.get_function_address("kernel"))


def _fresh_machine() -> llvm.TargetMachine:
    """An engine takes its machine for itself."""
    _machine()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _key(name: str, stored: tuple[Stored, ...]) -> str:
    parts = (
        name, *stored, str(WIDTH), _sources_digest(), version("llvmlite"), llvm.get_process_triple(),
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(),
    )  # fmt: skip
    return f"{name.removeprefix('quant.')}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"


@cache
def _cache_folder() -> Path:
    named = os.environ.get("CONVERT_MTP_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(named) if named else base / "convert-mtp" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="convert-mtp-"))  # a folder that no one else has filled
    return folder


def _read(file: Path) -> bytes | None:
    """The object code of a cache file, None where there is none or it is damaged."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    digest, code = raw[:32], raw[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """Best effort: without a cache every process compiles for itself."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
        Path(name).replace(file)
