"""The language model of a checkpoint on a paged cache: prefill and decode alike.

The model's own top-level forward does the work (scatter of image rows, deepstack,
logit scaling); this module gives it a flattened batch, explicit positions, and an
attention that reads and writes the pool. It keeps no state between forwards: the
pool is the caller's, and positions travel with the request.

Shapes: T new tokens of all sequences; P position rows (1, or 4 with mRoPE: text,
time, height, width); N selected rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.errors import invalid
from epd.jobs import ImageItem
from epd.kv.pool import KvPool
from epd.models import attention
from epd.models.attention import AttentionStep, Kernel, plan_step
from epd.models.backends import device_attention, isa, kv_layout, usable_device
from epd.models.batch import ForwardBatch, SequenceSlice
from epd.models.checkpoint import load_part, weights_bytes
from epd.models.exact import ROW_TILE, make_row_invariant
from epd.models.gpu.attention import DeviceAttention
from epd.models.gpu.graphs import DecodeGraphs, buckets
from epd.models.image_rows import ImageRows, RowScatter
from epd.models.kernels import build
from epd.models.kernels.attention import AttentionKernel
from epd.models.kernels.build import Library
from epd.models.kernels.layer import fuse_layers
from epd.models.kernels.linear import Int8Kernel, LinearKernel, pack_linears
from epd.models.kernels.memory import keep_freed_memory
from epd.models.kernels.norm import FusedNorm, fuse_norm
from epd.models.kernels.stack import Stack, stack_layers
from epd.models.positions import PositionRows
from epd.models.progress import report_layers
from epd.models.quantize import NAME, quantize_linears
from epd.models.shortcut import Decoded, DecodeRow, Shortcut, agree, make_shortcut
from epd.models.spec import ModelSpec, read_spec

__all__ = ["DecodeRow", "Decoded", "ForwardBatch", "LanguageModel", "SequenceSlice"]

Quantize = Literal["off", "int8", "int8-decode"]
_WHOLE_ROWS: Final = 64
"""In one call for all layers; more take their time, and stalls are seen by layers."""
_PROBE_TOKENS: Final = 24


class LanguageModel:
    """A checkpoint without its vision tower. Its forwards run in one thread at a time."""

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        *,
        device: torch.device,
        exact: bool,
        block_tokens: int,
        kernels: Library | None = None,
        quantize: Quantize = "off",
        on_device: bool = True,
    ) -> None:
        self.model = model.to(device)
        self._rows = PositionRows(self.model, spec.image_token_id)
        self._image_rows = RowScatter(self.model, spec, device)
        self.weights_bytes = weights_bytes(model)
        """As loaded, before kernels or int8 keep them in another form."""
        self.spec = spec
        self.device = device
        self.exact = exact
        self.quantize = quantize
        text = model.config.get_text_config()
        weights = NAME if quantize == "int8" else ""
        self.kv_layout = kv_layout(text, spec.dtype, block_tokens, weights)
        self._kernels = kernels
        self._attention: Kernel | None = None
        self._graphs: DecodeGraphs | None = None
        self._whole_rows = 0
        """So many go through all layers in one call."""
        self._norm: FusedNorm | None = None
        self._shortcut: Shortcut | None = None
        self._reports: list[Callable[[], None]] = []
        if kernels is not None:
            self._use(kernels)
        elif device.type == "cuda" and on_device and not exact:
            self._attention = device_attention(self.kv_layout, text.num_attention_heads)
        elif quantize != "off":
            quantize_linears(self.model, ROW_TILE if exact else None)
        if exact:
            make_row_invariant(self.model)
        if kernels is not None:
            stack = stack_layers(self.model.get_decoder(), kernels, torch.get_num_threads())
            if stack is not None and self._try_whole():
                self._try_shortcut(stack, kernels)

    def _use(self, library: Library) -> None:
        """Run on compiled kernels from now on."""
        threads = torch.get_num_threads()
        kernel = LinearKernel if self.quantize == "off" else Int8Kernel
        pack_linears(self.model, kernel(library, threads))
        self._attention = AttentionKernel(library, threads)
        fuse_layers(self.model.get_decoder(), library, threads)
        self._norm = fuse_norm(self.model.get_decoder(), library, threads)

    def _try_whole(self) -> bool:
        """Run few rows through all layers in one call from now on, if that gives the bits
        that the layers give one by one."""
        count = self.kv_layout.blocks_for(_PROBE_TOKENS)
        batch = ForwardBatch(
            token_ids=torch.arange(_PROBE_TOKENS).clamp(max=self.spec.vocab_size - 1),
            positions=self.continuation(0, _PROBE_TOKENS, 0),
            sequences=[SequenceSlice(_PROBE_TOKENS, _PROBE_TOKENS, list(range(count)))],
            select=range(_PROBE_TOKENS),
        )
        pool = KvPool(self.kv_layout, count)
        apart = self.forward(batch, pool)
        self._whole_rows = _WHOLE_ROWS
        if not torch.equal(apart, self.forward(batch, pool)):
            self._whole_rows = 0
        return self._whole_rows > 0

    def _try_shortcut(self, stack: Stack, library: Library) -> None:
        """Run decode steps without the model's own Python from now on, if that gives the bits
        that its forward gives."""
        if self._norm is None:
            return
        threads = torch.get_num_threads()
        other = (self.spec.image_token_id + 1) % self.spec.vocab_size
        shortcut = make_shortcut(library, self.model, stack, self._norm, self._rows.mrope, threads)
        if shortcut and agree(shortcut, self._decode_by_forward, self.kv_layout, (1, other, 2)):
            self._shortcut = shortcut

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
        exact: bool = False,
        threads: int = 1,
        block_tokens: int = 32,
        kernels: Literal["auto", "off"] = "auto",
        quantize: Quantize = "off",
    ) -> LanguageModel:
        """Load the language model's weights only; sets torch's threads for the process.

        `kernels`: "auto" uses the compiled ones (`epd.models.kernels`) where the model is
        bfloat16 on a CPU that has them; the first load on a machine compiles them.
        `quantize`: int8 weights in the linear layers (`epd.models.quantize`), by a kernel
        or by torch. "int8-decode" is the same, for blocks that plain weights filled.

        Raises:
            EpdError: the checkpoint can't be served; the message says why.
        """
        place = usable_device(device)
        if quantize != "off" and place.type != "cpu":
            raise invalid(f"{quantize} runs on CPUs, not on {place.type}", "model.quantize")
        torch.set_num_threads(threads)
        keep_freed_memory()
        spec = read_spec(path, dtype)
        model = load_part(path, "lm", spec.dtype, attn=attention.NAME)
        fits = kernels == "auto" and place.type == "cpu" and spec.dtype == "bfloat16"
        return cls(
            model,
            spec,
            device=place,
            exact=exact,
            block_tokens=block_tokens,
            kernels=build.load() if fits else None,
            quantize=quantize,
            on_device=kernels == "auto",
        )

    def report_layers(self, done: Callable[[], None]) -> None:
        """See `epd.models.progress`; a step that goes by a shortcut is one part."""
        report_layers(self.model, done)
        self._reports.append(done)

    @property
    def numerics_id(self) -> str:
        """Workers with equal ids compute equal bits in exact mode."""
        kernel = "exact/1" if self.exact else "sdpa/1"
        if isinstance(self._attention, DeviceAttention):
            kernel += f"+{self._attention.backend}"
        if self._kernels is not None:
            kernel += f"+kernels/{self._kernels.id}"
        if self.quantize != "off":
            kernel += f"+{NAME}"
        parts = [kernel, isa(self.device), self.spec.dtype, f"threads={torch.get_num_threads()}"]
        return ";".join([*parts, f"torch={torch.__version__}"])

    def positions(
        self, token_ids: Tensor, items: Sequence[ImageItem], prompt_length: int
    ) -> tuple[Tensor, int]:
        """Position rows [P, T] of prompt and generated ids, and the decode delta: see
        `PositionRows.of`. May run in another thread than `forward`."""
        return self._rows.of(token_ids, items, prompt_length)

    def continuation(self, start: int, count: int, delta: int) -> Tensor:
        """Position rows [P, count] of generated tokens at sequence indices start, ..."""
        return self._rows.continuation(start, count, delta)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """Logits [N, vocab] float32 of the selected rows; writes the new keys and values.

        Rows are independent of each other except through the sequences' own blocks.
        """
        replayed = self._replay(batch, pool)
        if replayed is not None:
            return replayed
        select = torch.as_tensor(batch.select, dtype=torch.int64, device=self.device)
        kept = select.contiguous() if len(select) < len(batch.token_ids) else None
        image_rows = self._image_rows(batch)  # models may add some between layers
        step = plan_step(
            pool,
            batch.sequences,
            exact=self.exact,
            kernel=self._attention,
            kept=kept,
            whole=image_rows is None and len(batch.token_ids) <= self._whole_rows,
        )
        assert step.tokens == len(batch.token_ids) == batch.positions.shape[1]
        token_ids, positions = self._padded(batch)
        return self._run(token_ids, positions, select, step, image_rows)

    @torch.inference_mode()
    def decode(
        self,
        rows: Sequence[DecodeRow],
        pool: KvPool,
        begin: Callable[[], None] = lambda: None,
    ) -> Decoded:
        """Logits of each row's next token. Writes the new keys and values.

        `begin` is called when everything is prepared: what needs the interpreter may run now.
        """
        few = len(rows) <= self._whole_rows
        if self._shortcut is None or not few or not self._shortcut.takes(rows, self.spec):
            begin()
            return Decoded(self._decode_by_forward(rows, pool), None)
        decoded = self._shortcut(rows, pool, begin)
        for done in self._reports:
            done()
        return decoded

    def _decode_by_forward(self, rows: Sequence[DecodeRow], pool: KvPool) -> Tensor:
        """Logits [N, vocab] float32."""
        positions = [self.continuation(row.kv_len - 1, 1, row.delta) for row in rows]
        batch = ForwardBatch(
            token_ids=torch.tensor([row.token_id for row in rows]),
            positions=torch.cat(positions, 1),
            sequences=[SequenceSlice(1, row.kv_len, row.blocks) for row in rows],
            select=torch.arange(len(rows)),
        )
        return self.forward(batch, pool)

    def _replay(self, batch: ForwardBatch, pool: KvPool) -> Tensor | None:
        """By a CUDA graph, where one fits. Placeholder ids, generated ones too, need rows."""
        if self._graphs is None or self._graphs.pool is not pool:
            return None
        if bool((batch.token_ids == self.spec.image_token_id).any()):
            return None
        logits = self._graphs.run(batch.token_ids, batch.positions, batch.sequences)
        if logits is None:
            return None
        return logits[torch.as_tensor(batch.select, device=self.device)]

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        select: Tensor,
        step: AttentionStep,
        image_rows: dict[str, ImageRows] | None = None,
    ) -> Tensor:
        """Logits [N, vocab] float32; everything is on the device."""
        logits: Tensor = self.model(
            input_ids=token_ids[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            mm_encoder_outputs=image_rows,
            logits_to_keep=select,
            use_cache=False,
            step=step,
        ).logits[0]
        return logits.float()

    @torch.inference_mode()
    def prepare_decode(self, pool: KvPool, most: int, max_context: int) -> None:
        """Make decode steps of up to `most` sequences in `pool` fast where that takes
        preparing: CUDA graphs, seconds. Nothing on a CPU."""
        if not isinstance(self._attention, DeviceAttention):
            return
        self._graphs = DecodeGraphs(
            self._run,
            self._attention,
            pool,
            sizes=buckets(most),
            position_rows=len(self.continuation(0, 1, 0)),
            max_context=max_context,
        )

    def _padded(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Ids and positions on the device, in exact mode padded to whole row tiles."""
        token_ids = batch.token_ids.to(self.device)
        positions = batch.positions.to(self.device)
        lacking = -len(token_ids) % ROW_TILE if self.exact else 0
        if lacking:
            ordinary = 0 if self.spec.image_token_id != 0 else 1
            token_ids = F.pad(token_ids, (0, lacking), value=ordinary)
            positions = F.pad(positions, (0, lacking))
        return token_ids, positions
