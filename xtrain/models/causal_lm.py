"""CausalLM: what the language models of all families do around their layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .. import _C, generation, nn, saving
from .._C import Tensor
from .._types import Device, Tokenizer
from ..generation import KVCache
from ..nn.module import LoadResult, is_stock
from ..tensors.documents import check_bounds, check_rows, positions_in
from .language_model import LanguageModel

if TYPE_CHECKING:
    from typing_extensions import Self


class CausalLM(LanguageModel):
    """Head, loss, files and generation. A family has layers, `lm_head`, an nn.Linear or None for the token table, and
    `table`: the name of that table, in a module that turns ids [B, S] into [B*S, C].
    """

    table: ClassVar[str]
    lm_head: nn.Linear | None

    def _trunk(self) -> Any:
        return getattr(self, self.table.partition(".")[0])

    def _embedding(self) -> Any:
        return getattr(self._trunk(), self.table.rpartition(".")[2])

    def _table(self) -> Tensor:
        """The weight [V, C] of the head that is tied to the token table."""
        weight = getattr(self._embedding(), "weight", None)
        if not isinstance(weight, _C.Tensor):
            kind, name = type(self._embedding()).__name__, self.table.rpartition(".")[2]
            raise TypeError(f"{self.config.family}: {name} must have a weight while lm_head is None, got {kind}")
        return weight

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if not isinstance(ids, _C.Tensor):
            raise TypeError(f"{self.config.family}: {name} must be a Tensor, got {type(ids).__name__}")
        if ids.ndim != 2:
            raise ValueError(f"{self.config.family}: {name} must have shape (B, S), got {tuple(ids.shape)}")
        if ids.shape[1] == 0:
            raise ValueError(
                f"{self.config.family}: {name} must have at least one token per sequence, got shape {tuple(ids.shape)}"
            )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """ids [B, S] int64 or int32 -> logits [B, S, V].

        positions: None (0..S-1 in every sequence) or int64 [B*S]. caches: a list of KVCache, one per layer, see
        `make_caches`. documents: int32 [B, 2, S] of functional.document_bounds, for rows that hold several documents: a
        token sees its own alone, and positions, where they are None, begin anew in each. Without caches.
        """
        self._check_ids("ids", ids)
        positions, more = self._places(ids, positions, caches, documents)
        layers = self.config.num_hidden_layers
        if caches is not None and len(caches) != layers:
            raise ValueError(f"{self.config.family}: caches must be one per layer, {layers}, got {len(caches)}")
        batch, seq = ids.shape
        if seq == 1 and not more and (stepped := self._step(ids, positions, caches)) is not None:
            return self._capped(stepped).view(batch, 1, stepped.shape[-1])
        x = self._trunk()(ids, positions, caches, *more)
        logits = self._capped(_C.linear(x, self._table()) if self.lm_head is None else self.lm_head(x))
        return logits.view(batch, seq, logits.shape[-1])

    def _step(self, ids: Tensor, positions: Tensor | None, caches: list[KVCache] | None) -> Tensor | None:
        """Logits [B, V] of one new token a row, ids [B, 1], in one op; None where the family has none that would do."""
        del ids, positions, caches
        return None

    def _softcap(self) -> float | None:
        """c, where a logit z of the head becomes c tanh(z / c)."""
        return getattr(self.config, "final_logit_softcapping", None)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self._softcap()
        return logits if cap is None else _C.tanh(logits / cap) * cap

    def _places(
        self, ids: Tensor, positions: Tensor | None, caches: object, documents: Tensor | None
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Positions, and what else the trunk gets: (documents,), or nothing."""
        if documents is None:
            return positions, ()
        check_bounds(self.config.family, documents, *ids.shape, name="ids", device=ids.device)
        if caches is not None:
            raise ValueError(f"{self.config.family}: documents must be None with caches, got both")
        check_rows(documents)
        return positions_in(documents) if positions is None else positions, (documents,)

    def features(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """The hidden states that the head reads: ids [B, S] -> [B*S, C]. documents: see forward."""
        self._check_ids("ids", ids)
        positions, more = self._places(ids, None, None, documents)
        return self._trunk()(ids, positions, None, *more)

    def last_logits(
        self, ids: Tensor, positions: Tensor | None, caches: list[KVCache] | None, rows: Tensor | None = None
    ) -> Tensor:
        """Logits [B, V] of the last token of each sequence, or of the tokens `rows`, int64 [B], indices into the flat
        ids [B*S]. They equal those of self(ids, positions, caches). The head runs on these tokens alone, unless the
        head or the model has hooks or another `forward`, which must see all tokens.
        """
        batch, seq = ids.shape
        head, cap = self.lm_head, self._capped
        if self._is_whole() and (head is None or is_stock(head, nn.Linear)):
            x = self._trunk()(ids, positions, caches)
        else:
            logits = self(ids, positions, caches)
            x, head, cap = logits.view(batch * seq, logits.shape[-1]), nn.Identity(), nn.Identity()
        x = _C.select(x.view(batch, seq, x.shape[-1]), 1, seq - 1) if rows is None else x.index_select(0, rows)
        return cap(_C.linear(x, self._table()) if head is None else head(x))

    def _is_whole(self) -> bool:
        """Whether the model has no hooks and its own `forward`, so that its parts may be called in place of it."""
        return is_stock(self, type(self)) and type(self).forward is CausalLM._defined_forward

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss: float = 0.0,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Cross entropy in nats of targets [B, S] given ids [B, S]; mean over all rows that are not ignored, "sum", or
        "none" -> [B*S]. z_loss: see functional.linear_cross_entropy. documents: as of forward; the target of the last
        token of each is the caller's to ignore.

        One op computes head and loss, see functional.linear_cross_entropy, unless the head is not a plain nn.Linear
        without bias, or head or model have hooks or another `forward`: then it is the cross entropy of self(ids).
        """
        self._check_ids("ids", ids)
        self._check_ids("targets", targets)
        if ids.shape != targets.shape:
            raise ValueError(
                f"{self.config.family}: targets must have shape {tuple(ids.shape)}, got {tuple(targets.shape)}"
            )
        options: dict[str, Any] = dict(ignore_index=ignore_index, reduction=reduction, z_loss=z_loss)
        head, targets = self.lm_head, targets.reshape(-1)
        if self._is_whole() and (head is None or (is_stock(head, nn.Linear) and head.bias is None)):
            weight = self._table() if head is None else head.weight
            positions, more = self._places(ids, None, None, documents)
            x = self._trunk()(ids) if documents is None else self._trunk()(ids, positions, None, *more)
            return _C.linear_cross_entropy(x, weight, targets, **options, softcap=self._softcap())
        logits = self(ids) if documents is None else self(ids, documents=documents)
        return _C.cross_entropy(logits.view(-1, logits.shape[-1]), targets, **options)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> LoadResult:
        """As Module.load_state_dict; a tied model accepts `lm_head.weight` when it equals the embedding and refuses it
        otherwise.
        """
        head = state_dict.get("lm_head.weight")
        if head is not None and self.lm_head is None:
            table = state_dict.get(f"{self.table}.weight")
            if table is None or head.shape != table.shape or not (head == table).all().item():
                raise ValueError(
                    f"load_state_dict: lm_head.weight must equal {self.table}.weight when tied, got another value"
                )
            state_dict = {key: value for key, value in state_dict.items() if key != "lm_head.weight"}
        return super().load_state_dict(state_dict, strict)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of trained values; without `embeddings` those of the token table are left out (unless they are the
        head too).
        """
        count = sum(parameter.numel() for parameter in self.parameters())
        if not embeddings and self.lm_head is not None:
            count -= sum(parameter.numel() for parameter in self._embedding().parameters())
        return count

    def idle_weights(self) -> int:
        """Number of frozen parameters outside the token table. Backward computes no gradient of them, which saves 2
        floating-point operations a token each. A table that is also the head counts.
        """
        table = set() if self.lm_head is None else {id(p) for p in self._embedding().parameters()}
        return sum(p.numel() for p in self.parameters() if not p.requires_grad and id(p) not in table)

    def make_caches(self, batch: int, length: int) -> list[KVCache]:
        """Empty key/value caches for `length` positions of `batch` sequences, one per layer."""
        return [KVCache(batch, length) for _ in range(self.config.num_hidden_layers)]

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> Tensor:
        """Continues ids by sampling; see xtrain.generation.generate."""
        return generation.generate(self, ids, max_new_tokens, **options)

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], dtype: _C.dtype | None = None, device: Device = None
    ) -> Self:
        """A model from a Hugging Face model directory; dtype None keeps that of the files. models.load takes a
        directory of any family.
        """
        model = saving.load_model(directory, dtype=dtype, device=device)
        if not isinstance(model, cls):
            raise ValueError(f"from_pretrained: {directory} must hold a {cls.__name__}, got {type(model).__name__}")
        return model

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        max_shard_size: int | str = saving.SHARD_BYTES,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Writes config.json and model.safetensors, a directory that Hugging Face's from_pretrained reads, and the
        files of `tokenizer`. Tensors of more than max_shard_size, bytes or a text such as "500MB" or "2GiB", are split
        into several files, see saving.save_model.
        """
        saving.save_model(self, directory, tokenizer=tokenizer, shard_bytes=saving.parse_size(max_shard_size))
