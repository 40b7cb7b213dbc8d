"""Roofline: predicts a step's time from the facts of a model and a device.

Owns: the bytes and FLOP of a step's parts; the efficiencies (reached shares of the peaks).
Does not: look up facts (hardware).
Each part takes the larger of bytes / bandwidth and FLOP / peak (Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model", CACM 2009). The parts run one after another.
The experts of a layer are divided over tp * dp devices, as whole experts or as slices. Each device reads the part that
it has of the expected experts that the tokens of all ranks use, and a rank with peers gathers their tokens before and
scatters results after. A step with pipeline stages is priced as a whole (pipeline divides it).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.simulator.cost_model import CostModel, StepParts, StepShape, TimeFloor
from octavo.simulator.costs.hardware import Hardware, ModelFacts, expected_experts


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The shares of the peaks that kernels reach, the same for every device. docs/fidelity.md has the accuracy."""

    bandwidth: float = 0.80
    matmul: float = 0.70
    attention_bandwidth: float = 0.70
    attention: float = 0.45
    link: float = 0.70


EFFICIENCIES = Efficiencies()


class Roofline(CostModel):
    """A CostModel from facts. Every layer is split over all devices. Copied blocks cost their bytes.

    `decode_s` is None for a model with sliding windows.
    """

    def __init__(self, hardware: Hardware, efficiencies: Efficiencies = EFFICIENCIES) -> None:
        model, device, tp, share = hardware.model, hardware.device, hardware.tp, efficiencies
        if tp < 1 or model.num_heads % tp:
            raise ConfigError(f"tp is {tp}; give a number that divides the {model.num_heads} heads of {model.name}")
        self.name = f"roofline:{model.name}:{device.name}" + (f":tp{tp}" if tp > 1 else "")
        self._model = model
        self._device = device
        self._tp = tp
        self._bandwidth = device.bandwidth * share.bandwidth * tp
        self._read_s = model.dense_weights * model.linear_bytes / self._bandwidth
        self._expert_s = model.expert_weights * model.linear_bytes / self._bandwidth
        width = 6 * model.hidden_size + 3 * (model.active_experts * model.expert_size or model.intermediate_size)
        self._activation_s = 2 * width / self._bandwidth
        self._expert_s /= hardware.dp
        product_s = 2 / (device.flops(model.linear_bytes) * share.matmul * tp)
        self._product_s = product_s * model.dense_weights
        self._expert_product_s = product_s * model.active_experts * model.expert_weights / hardware.dp
        head_flops = device.flops(model.head_bytes / model.head_weights) * share.matmul * tp
        self._head_read_s = model.head_bytes / self._bandwidth
        self._head_product_s = 2 * model.head_weights / head_flops
        kv_tp = min(tp, model.num_kv_heads)  # with more devices than KV heads, devices hold copies of heads
        self._kv_s = model.kv_bytes_per_token_layer / (device.bandwidth * share.attention_bandwidth * kv_tp)
        self._score_s = 4 * model.num_heads * model.head_dim / (device.flops16 * share.attention * tp)
        self._link_bandwidth = device.link_bandwidth * share.link
        self._block_bytes = model.kv_bytes_per_token * hardware.block_size / kv_tp
        self._windows = _count_windows(model)
        self._decodes: dict[int, float] = {}  # batch size -> seconds, for decode-only steps
        self.decode_s = None if model.windows else self._decode_s

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        tokens = shape.num_tokens
        attention = sum(count * self._attention_s(shape, window) for window, count in self._windows)
        linear = self._linear_s(tokens, shape.num_samples, shape.peer_tokens)
        return linear + attention + self._transfer_s(shape)

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of scheduling and delivery: half of the device's `step_s`, and 0.5 % of it for each row."""
        return self._device.step_s * (0.5 + 0.005 * (len(shape.decode_kv) + len(shape.prefills)))

    def parts(self, shape: StepShape) -> StepParts:
        """Return a step's seconds by what bounds them. A part that is not bound by compute is bound by memory."""
        tokens, layers, device = shape.num_tokens, self._model.num_layers, self._device
        of_peers = sum(shape.peer_tokens)
        work: list[tuple[float, float]] = []  # seconds to read and seconds to multiply, one pair per part
        if tokens:
            read_s, product_s = self._layer_work(tokens, of_peers)
            work.append((layers * read_s, layers * product_s))
            work.append((self._head_read_s, shape.num_samples * self._head_product_s))
        for window, count in self._windows:
            for read, pairs in self._attention_work(shape, window):
                work.append((count * read * self._kv_s, count * pairs * self._score_s))
        compute_s = sum(product_s for read_s, product_s in work if product_s > read_s)
        memory_s = sum(read_s for read_s, product_s in work if product_s <= read_s)
        links_s = layers * self._links_s(tokens, of_peers) if tokens else 0.0
        fixed_s = device.step_s + (layers * device.kernel_s if tokens else 0.0)
        return StepParts(
            {
                "compute": compute_s, "memory bandwidth": memory_s, "links": links_s,
                "copies of blocks": self._transfer_s(shape), "fixed costs": fixed_s,
            },
            sum(product_s for _, product_s in work),
        )  # fmt: skip

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return two floors: layers bound by reads, and layers bound by products.

        The experts that n tokens use are concave in n, so they are at least those on the chord from 1 to `max_tokens`.
        Attention counts in layers without a window, and that of chunks by its products alone.
        """
        model, layers = self._model, self._model.num_layers
        few, many = (
            expected_experts(model.num_experts, model.active_experts, tokens) for tokens in (1, max(2, max_tokens))
        )
        per_token = (many - few) / (max(2, max_tokens) - 1)
        link_s = 2 * self._reduce_s(0)
        token_link_s = 2 * self._reduce_s(1) - link_s
        fixed_s = layers * (self._device.kernel_s + link_s) + self._head_read_s + self._device.step_s
        read_s = self._read_s + (few - per_token) * self._expert_s
        read_token_s = per_token * self._expert_s + self._activation_s
        full = sum(count for window, count in self._windows if window is None)
        kv_s, pair_s = full * max(self._kv_s, self._score_s), full * self._score_s
        return (
            TimeFloor(fixed_s + layers * read_s, layers * (read_token_s + token_link_s), kv_s, pair_s),
            TimeFloor(fixed_s, layers * (self._product_s + self._expert_product_s + token_link_s), kv_s, pair_s),
        )

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        attention = self._model.num_layers * max(kv_sum * self._kv_s, kv_sum * self._score_s)
        return self._linear_s(num_rows, num_rows) + attention + 0.0

    def _linear_s(self, tokens: int, samples: int, peers: tuple[int, ...] = ()) -> float:
        """Return seconds of projections, feed-forward, output head, the gaps between kernels, and communication."""
        if not tokens:
            return self._device.step_s
        is_plain = tokens == samples and not peers
        known = self._decodes.get(tokens) if is_plain else None
        if known is not None:
            return known
        of_peers = sum(peers)
        layer = max(self._layer_work(tokens, of_peers)) + self._links_s(tokens, of_peers)
        head = max(self._head_read_s, samples * self._head_product_s)
        time_s = self._model.num_layers * (layer + self._device.kernel_s) + head + self._device.step_s
        if is_plain:
            self._decodes[tokens] = time_s
        return time_s

    def _layer_work(self, tokens: int, of_peers: int) -> tuple[float, float]:
        """Return seconds to read a layer's weights and activations, and seconds of its products."""
        used = expected_experts(self._model.num_experts, self._model.active_experts, tokens + of_peers)
        read_s = self._read_s + used * self._expert_s + tokens * self._activation_s
        return read_s, tokens * self._product_s + (tokens + of_peers) * self._expert_product_s

    def _links_s(self, tokens: int, of_peers: int) -> float:
        """Return seconds of a layer's all-reduces and exchanges."""
        return 2 * self._reduce_s(tokens) + 2 * self._exchange_s(of_peers)

    def _attention_s(self, shape: StepShape, window: int | None) -> float:
        """Return seconds of one layer's attention: reads and products, of decode rows and of chunks."""
        time_s = 0.0
        for read, pairs in self._attention_work(shape, window):
            time_s += max(read * self._kv_s, pairs * self._score_s)
        return time_s

    def _attention_work(self, shape: StepShape, window: int | None) -> list[tuple[int, int]]:
        """Return the (positions read, pairs of positions) of all decode rows together, and of each chunk."""
        kv = sum(shape.decode_kv) if window is None else sum(min(length, window) for length in shape.decode_kv)
        work = [(kv, kv)]
        for count, before in shape.prefills:
            if window is None:
                work.append((before + count, count * before + count * (count + 1) // 2))
            else:
                read = min(before + count, window + count)
                work.append((read, count * min(window, before + (count + 1) // 2)))
        return work

    def _reduce_s(self, tokens: int) -> float:
        """Return seconds of one ring all-reduce of the step's activations."""
        if self._tp == 1:
            return 0.0
        moved = 2 * (self._tp - 1) / self._tp * tokens * self._model.hidden_size * 2
        return self._device.link_s + moved / self._link_bandwidth

    def _exchange_s(self, tokens: int) -> float:
        """Return seconds in which a rank's devices get, or give, a share each of the peers' activations."""
        if not tokens:
            return 0.0
        return self._device.link_s + tokens * self._model.hidden_size * 2 / (self._link_bandwidth * self._tp)

    def _transfer_s(self, shape: StepShape) -> float:
        """Return seconds of blocks copied on the device, and of those moved to and from the host."""
        if not (shape.copied_blocks or shape.swapped_out_blocks or shape.loaded_blocks):
            return 0.0
        on_device = 2 * shape.copied_blocks * self._block_bytes / self._bandwidth
        hosted = shape.swapped_out_blocks + shape.loaded_blocks
        return on_device + hosted * self._block_bytes / self._device.host_bandwidth


def _count_windows(model: ModelFacts) -> list[tuple[int | None, int]]:
    """Return (window, number of layers) pairs."""
    counts: dict[int | None, int] = {}
    for window in model.windows or (None,) * model.num_layers:
        counts[window] = counts.get(window, 0) + 1
    return list(counts.items())
