"""Several devices on a machine that has one: tensors that say where they are, and operations that refuse to mix.

A `Pretend` tensor holds real data on the processor and reports another device. Operations run on the data, so their
numbers are those of the processor to the last bit, but what a real accelerator refuses is refused here too:

- tensors of two devices in one operation, except a number (no axes) on the processor in elementwise work;
- indices that are neither on the processor nor where the indexed tensor is;
- data read without having been moved to the processor.

The device type is PyTorch's "lazy", which no build computes on but whose gradients run on the processor's thread.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

TYPE = "lazy"
CPU = torch.device("cpu")
_aten: Any = torch.ops.aten
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_NUMBERS = {_aten.where.self, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor, _aten.fill_.Tensor}
_ON_CPU: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # type: ignore[attr-defined]
_MOVES = {_aten.copy_.default, _aten._to_copy.default}


def device(index: int) -> torch.device:
    """The pretended device of this number."""
    return torch.device(TYPE, index)


class Pretend(torch.Tensor):
    """A tensor whose data, `held`, is on the processor and that says it is elsewhere."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, where: torch.device) -> "Pretend":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=where,
        )
        made.held = held
        return made

    def __repr__(self, **options: Any) -> str:
        return f"Pretend({tuple(self.shape)}, {self.device})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any) -> Any:
        return torch.tensor(data, dtype=self.dtype).to(self.device)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _indices(index: Any) -> Any:
    """Lists as tensors: PyTorch makes them where the indexed tensor is, without asking anybody."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


class _Everywhere(TorchDispatchMode):
    """The same for operations on ordinary tensors, which may move them or be told a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    held, held_kwargs = _opened(args, tensors), _opened(kwargs, tensors)
    where = _where(func, args, tensors)
    if kwargs.get("device") is not None:
        where = torch.device(kwargs["device"])
        held_kwargs = {**held_kwargs, "device": CPU}
        if where.type not in (TYPE, "cpu"):
            raise RuntimeError(f"{func}: no such device in this pretence: {where}")
    out = func(*held, **held_kwargs)
    written, moves_outside = _facts(func)
    if moves_outside and where != CPU:
        inside = args[0].held  # the outside of the tensor follows its data
        with no_dispatch():
            _aten.as_strided_.default.redispatch(
                _ON_CPU, args[0], inside.size(), inside.stride(), inside.storage_offset()
            )
    if written:
        found = [args[place] if place < len(args) else kwargs[name] for place, name in written]
        return found[0] if len(found) == 1 else tuple(found)
    return out if where == CPU else _closed(out, where)


def _opened(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The arguments with data in the place of pretended tensors; every tensor is noted."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return tree.held if isinstance(tree, Pretend) else tree
    if isinstance(tree, list | tuple):
        return [_opened(leaf, tensors) for leaf in tree]
    if isinstance(tree, dict):
        return {name: _opened(leaf, tensors) for name, leaf in tree.items()}
    return tree


def _closed(out: Any, where: torch.device) -> Any:
    if isinstance(out, torch.Tensor):
        return Pretend(out, where)
    return type(out)(_closed(leaf, where) for leaf in out) if isinstance(out, list | tuple) else out


@functools.cache
def _facts(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """The arguments that an operation in place gives back, and whether it changes their shape."""
    returns, written = func._schema.returns, list[tuple[int, str]]()
    if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
        for place, part in enumerate(func._schema.arguments):
            if part.alias_info is not None and part.alias_info.is_write:
                written.append((place, part.name))
    return tuple(written), torch.Tag.inplace_view in func.tags


def _where(func: Any, args: Any, tensors: list[torch.Tensor]) -> torch.device:
    """The one device that an operation runs on; RuntimeError where a real accelerator would refuse."""
    if not tensors:
        return CPU
    if func in _MOVES:
        return tensors[0].device
    if func in _INDEXED:
        first, values = args[0], args[2:3]
        wrong = [t.device for t in args[1] if t is not None and t.device not in (CPU, first.device)]
        if wrong:
            raise RuntimeError(f"{func}: indices are on {wrong[0]}, the indexed tensor on {first.device}")
        tensors = [first, *values]
    places = {t.device for t in tensors}
    if len(places) == 1:
        return tensors[0].device
    away = places - {CPU}
    pointwise = torch.Tag.pointwise in func.tags or func in _NUMBERS or func in _INDEXED
    numbers = pointwise and all(t.ndim == 0 for t in tensors if t.device == CPU)
    if len(away) > 1 or not numbers or (func._schema.is_mutable and tensors[0].device == CPU):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {sorted(map(str, places))}")
    return away.pop()


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Inside, tensors can be moved to and made on pretended devices (and nothing there casts on its own)."""
    enabled, autocast, make = torch.is_autocast_enabled, torch.autocast, torch.tensor

    def is_enabled(*kind: Any) -> bool:
        return False if kind == (TYPE,) else enabled(*kind)

    def cast(device_type: str, *rest: Any, **options: Any) -> Any:
        return contextlib.nullcontext() if device_type == TYPE else autocast(device_type, *rest, **options)

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """PyTorch makes an empty one without asking anybody."""
        made = make(data, **options)
        return made if device is None else made.to(device)

    patches = {"is_autocast_enabled": is_enabled, "autocast": cast, "tensor": tensor}
    with _Everywhere(), mock.patch.multiple(torch, **patches):
        yield


# Models


def shard(model: Any, unembed: int = 1) -> Any:
    """Spread a model of any backend: block `i` to device `i % 2`, embeddings to 0, final norm to 1; returns it.

    What is tied stays one tensor. Inputs of blocks, final norm and unembedding are moved to where their weights are,
    as libraries that spread models do.
    """
    moved: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    roots = [("", model), ("", getattr(model, "original_model", None))]
    for _, root in roots:
        for path, module in root.named_modules() if root is not None else ():
            if id(module) not in seen:
                seen.add(id(module))
                _move(module, device(_place(path, unembed)), moved)
    for module in (*model.blocks, getattr(model, "ln_final", None), model.unembed):
        if module is not None:
            module.register_forward_pre_hook(_follow, with_kwargs=True)
    return model


def _place(path: str, unembed: int) -> int:
    block = re.search(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)(?:\.|$)", path)
    if block:
        return int(block[1]) % 2
    if re.search(r"unembed|lm_head|embed_out", path):
        return unembed
    return 1 if re.search(r"ln_final|ln_f|final|norm", path) else 0


def _move(module: nn.Module, where: torch.device, moved: dict[int, torch.Tensor]) -> None:
    tied = [moved[id(tensor)].device for tensor in module._parameters.values() if id(tensor) in moved]
    where = tied[0] if tied else where
    for held in (module._parameters, module._buffers, vars(module)):
        for name, tensor in list(held.items()):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, Pretend):
                if id(tensor) not in moved:
                    there: torch.Tensor = Pretend(tensor.detach().clone(), where)
                    if isinstance(tensor, nn.Parameter):
                        there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = there
                held[name] = moved[id(tensor)]


def _follow(module: Any, args: Any, kwargs: Any) -> Any:
    where = next(iter(module.parameters())).device if list(module.parameters()) else None
    return (args, kwargs) if where is None else (send(args, where), send(kwargs, where))


def send(tree: Any, where: torch.device) -> Any:
    """Every tensor in a tree, moved."""
    return tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, torch.Tensor) else leaf, tree)
