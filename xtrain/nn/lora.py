"""LoRA: layers with a frozen weight, beside which a product of two narrow matrices is trained.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". Names, meaning and start values are PEFT's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from .. import _C
from .._C import Tensor
from .._types import is_real
from ..autograd import no_grad
from ..errors import ConfigError, shown
from . import init
from .layers import Dropout, Linear
from .module import Module, Parameter

ALL_LINEAR = "all-linear"
_M = TypeVar("_M", bound=Module)


@dataclass
class LoraConfig:
    """r: the rank, rows of A and columns of B. lora_alpha: B A is multiplied by lora_alpha / r, or with use_rslora by
    lora_alpha / sqrt(r). lora_dropout: of the input of A while training.

    target_modules: names of layers, each a whole dotted name or its end; a text is a regular expression for the whole
    name; "all-linear" is every linear layer but the head. base_model_name_or_path: of the model below, for the file.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: str | list[str] = ALL_LINEAR
    use_rslora: bool = False
    base_model_name_or_path: str | None = None

    def check(self) -> None:
        """Raise ConfigError for a value that is out of its range."""
        for name, rule, good in (
            ("r", "an integer of at least 1", type(self.r) is int and self.r >= 1),
            ("lora_alpha", "a positive number", _is_number(self.lora_alpha) and self.lora_alpha > 0),
            ("lora_dropout", "a number in [0, 1)", _is_number(self.lora_dropout) and 0 <= self.lora_dropout < 1),
            ("use_rslora", "true or false", type(self.use_rslora) is bool),
        ):
            if not good:
                raise ConfigError(f"lora: {name} must be {rule}, got {shown(getattr(self, name))}")
        targets = self.target_modules
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ConfigError(f"lora: target_modules {targets!r} is no regular expression: {error}") from None
        elif not isinstance(targets, (list, tuple, set)) or not all(type(name) is str and name for name in targets):
            raise ConfigError(f"lora: target_modules must be a text or a list of names, got {shown(targets)}")


def _is_number(value: object) -> bool:
    return is_real(value) and not isinstance(value, bool) and -sys.float_info.max <= value <= sys.float_info.max


class LoraLayer(Module):
    """What the classes of layers with LoRA share: y = base(x) + scaling * B(A(dropout(x))).

    lora_A, lora_B: Linear without bias, [r, in] and [out, r]. Weight and bias keep their names, and their values until
    `merge`. The classes below it come from LoraLayer and from the class that they stand for.
    """

    transposed: ClassVar[bool] = False  # whether the weight is [in, out]
    weight: Parameter
    bias: Any
    lora_A: Linear
    lora_B: Linear
    lora_dropout: Dropout
    scaling: float
    _original: Tensor | None = None  # the weight, while another one with B A in it is in its place

    def start(self, layer: Module, r: int, config: LoraConfig) -> None:
        """Take over the attributes of `layer`, and begin with B A = 0."""
        self.__dict__.update(layer.__dict__)
        rows, columns = self.weight.shape
        inputs, outputs = (rows, columns) if self.transposed else (columns, rows)
        place: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_A = Linear(inputs, r, False, **place)
        self.lora_B = Linear(r, outputs, False, **place)
        self.lora_dropout = Dropout(config.lora_dropout)
        self.scaling = config.lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        init.zeros_(self.lora_B.weight)

    def base(self, x: Tensor) -> Tensor:
        """What the layer computes without LoRA."""
        raise NotImplementedError(f"{type(self).__name__}: base must be defined")

    def forward(self, input: Tensor) -> Tensor:
        y = self.base(input)
        if self._original is not None:
            return y
        return y + self.lora_B(self.lora_A(self.lora_dropout(input))) * self.scaling

    @property
    def merged(self) -> bool:
        """Whether the weight has B A in it."""
        return self._original is not None

    @no_grad()
    def delta(self) -> Tensor:
        """scaling * B A, float32 or wider, with the shape of the weight."""
        wide = _C.float64 if self.weight.dtype == _C.float64 else _C.float32
        product = self.lora_B.weight.detach().to(wide) @ self.lora_A.weight.detach().to(wide) * self.scaling
        return product.transpose(0, 1) if self.transposed else product

    @no_grad()
    def merge(self) -> None:
        """Put weight + scaling * B A, rounded once, in the place of the weight, which is kept."""
        if self._original is None:
            original, delta = self.weight, self.delta()
            merged = (original.detach().to(delta.dtype) + delta).to(original.dtype)
            self.weight = Parameter(merged.contiguous(), original.requires_grad)
            self._original = original

    def unmerge(self) -> None:
        """Put the weight back that was there before `merge`, bit for bit."""
        if self._original is not None:
            original = self._original.detach().to(self.weight.dtype).to(self.weight.device)
            same = original.dtype == self._original.dtype and original.device == self._original.device
            kept: Any = self._original if same else Parameter(original, self.weight.requires_grad)
            self.weight, self._original = kept, None

    def _own(self, buffers: bool) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in super()._own(buffers) if name != "_original")


class LoraLinear(LoraLayer, Linear):
    """A Linear with LoRA."""

    def base(self, x: Tensor) -> Tensor:
        return _C.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.lora_A.out_features}, scaling={self.scaling}"


# Class of layers -> the class of theirs with LoRA; families of models add their own.
ADAPTED: dict[type[Module], type[LoraLayer]] = {Linear: LoraLinear}


def lora_layers(model: Module) -> dict[str, LoraLayer]:
    """{name: layer} of the layers with LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _targets(model: Module, config: LoraConfig) -> list[str]:
    """The names of the layers that the config means. ConfigError for a name that means none, or no linear layer."""
    wanted = config.target_modules
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if type(module) in ADAPTED]
    if wanted == ALL_LINEAR:
        return [name for name in linear if name.rpartition(".")[2] != "lm_head"]
    if isinstance(wanted, str):
        chosen = [name for name in modules if name and re.fullmatch(wanted, name)]
    else:
        chosen = [name for name in modules if any(f".{name}".endswith(f".{end}") for end in wanted)]
        for end in wanted:
            if not any(f".{name}".endswith(f".{end}") for name in chosen):
                ends = sorted({name.rpartition(".")[2] for name in linear})
                raise ConfigError(
                    f"lora: target_modules must be layers of the model, among {', '.join(ends)}, got {end!r}"
                )
    other = [name for name in chosen if name not in linear]
    if other:
        kind = type(modules[other[0]]).__name__
        raise ConfigError(f"lora: target_modules must be linear layers, got {other[0]}, a {kind}")
    return chosen


def apply(model: _M, config: LoraConfig | None = None, **options: Any) -> _M:
    """Put layers with LoRA in the place of those that `config` names, freeze every other parameter, and return the
    model, which is changed. options: those of LoraConfig, without a config.

    The optimizer is to be made after that, of the parameters that require a gradient. ConfigError for values out of
    their range, for names that the model does not have, and for a model that has LoRA already.
    """
    config = LoraConfig(**options) if config is None else dataclasses.replace(config, **options)
    config.check()
    if not isinstance(model, Module):
        raise TypeError(f"lora: model must be a Module, got {type(model).__name__}")
    if lora_layers(model):
        raise ConfigError("lora: the model must have no LoRA yet, got one that has; see lora.unload")
    names = _targets(model, config)
    if not names:
        raise ConfigError(f"lora: target_modules must name a layer of the model, got {shown(config.target_modules)}")
    place_layers(model, dict.fromkeys(names, config.r), config)
    return model


def place_layers(model: Module, ranks: dict[str, int], config: LoraConfig) -> None:
    """Put layers with LoRA of these ranks in the place of the layers of these names, and freeze the rest."""
    modules = dict(model.named_modules())
    new: dict[int, LoraLayer] = {}
    for name, r in ranks.items():
        kind = ADAPTED[type(modules[name])]
        layer = kind.__new__(kind)
        layer.start(modules[name], r, config)
        layer.train(modules[name].training)
        new[id(modules[name])] = layer
    model.requires_grad_(False)
    _replace(model, new)
    object.__setattr__(model, "lora_config", config)


def _replace(model: Module, new: dict[int, Any]) -> None:
    """Put modules in the place of others, wherever these are in the model. new: {id of the old: module}."""
    for module in list(model.modules()):
        for name, value in list(module.__dict__.items()):
            if id(value) in new:
                object.__setattr__(module, name, new[id(value)])


def merge(model: _M) -> _M:
    """Add B A to the weights, so that each layer is one product, and return the model, which is changed. `unmerge`
    takes it back.
    """
    for layer in lora_layers(model).values():
        layer.merge()
    return model


def unmerge(model: _M) -> _M:
    """Put the weights back that were there before `merge`, bit for bit; return the model."""
    for layer in lora_layers(model).values():
        layer.unmerge()
    return model


@no_grad()
def unload(model: _M, merge: bool = True) -> _M:
    """Take LoRA out of the model and return it: with `merge` the weights have B A in them for good, else they are as
    before. Every parameter requires a gradient again.
    """
    new: dict[int, Any] = {}
    for layer in lora_layers(model).values():
        layer.unmerge()
        if merge:  # in place: weights that lie together in memory stay so
            delta = layer.delta()
            layer.weight.copy_((layer.weight.detach().to(delta.dtype) + delta).to(layer.weight.dtype))
        kind: Any = next(kind for kind, adapted in ADAPTED.items() if adapted is type(layer))
        plain = kind.__new__(kind)
        own = ("lora_A", "lora_B", "lora_dropout", "scaling", "_original")
        plain.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in own})
        new[id(layer)] = plain
    _replace(model, new)
    model.__dict__.pop("lora_config", None)
    return model.requires_grad_(True)
