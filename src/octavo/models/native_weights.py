"""The weights of a native decoder: packed linear layers, float32 vectors.

Owns: the fields of a layer; the packed weights that each linear layer consists of; packing these weights or mapping
them from the cache.
Does not: compute, or know a packed layout.
Invariants: a linear layer consists of packed weights over consecutive runs of output rows, in order. It has more than
one packed weight only if its tensors have different kinds. Vectors are contiguous float32.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from octavo.artifacts.families import FAMILIES, LINEARS, layer_norms, linear_shape, linear_tensors
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.packed_weight import ALIGNMENT, Bytes, PackedWeight, WeightKind, WeightShape
from octavo.nn.packing import NoCodesError, WantedTensor, WeightRun, code_kinds, pack_runs, packing_version, plan_runs
from octavo.nn.weight_cache import CacheKey, StoredWeights, UnfitError, WeightCache
from octavo.nn.weights import INDEX_FILE, open_weights

Vector = npt.NDArray[np.float32]

TABLES = {"int4": "int8"}  # the embedding and the head lose too much at 4 bits
_UNRELATED_FIELDS = ("generation", "eos_token_ids", "bos_token_id", "max_model_len")


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer. Norms include the family's offset, in float32; `q_norm` also includes the query scalar.

    `after_attention` is the norm of attention's output and `after_mlp` that of the MLP's output; None if the family
    has none. Biases are in the packed weights. A fused layer's first weight computes the first outputs.
    """

    qkv: tuple[PackedWeight, ...]
    output: tuple[PackedWeight, ...]
    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    attention_norm: Vector
    mlp_norm: Vector
    after_attention: Vector | None = None
    after_mlp: Vector | None = None
    q_norm: Vector | None = None
    k_norm: Vector | None = None


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The weights of a model. A tied head and the embedding are one object. `notes` are sentences for the user."""

    layers: tuple[NativeLayer, ...]
    embedding: PackedWeight
    head: PackedWeight
    final_norm: Vector
    rope_factors: Vector | None
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights; a tied head counts once."""
        tables = self.embedding.nbytes + (0 if self.head is self.embedding else self.head.nbytes)
        layers = ((*layer.qkv, *layer.output, *layer.gate_up, *layer.down) for layer in self.layers)
        return tables + sum(weight.nbytes for weights in layers for weight in weights)


def load_native_weights(
    files: ModelFiles, spec: ModelSpec, quantization: str, dtype: torch.dtype, cache: WeightCache | None = None
) -> NativeWeights:
    """Pack the model's weights, or map them from `cache`; without a cache, pack into memory. Raises ModelFileError.

    `quantization` is "none", "int8", "int4", or "auto" for the files' own codes (see packing.choose_quantization).
    `dtype` applies to weights that stay float: bfloat16, or else float32, which represents float16 exactly.
    """
    wanted = wanted_tensors(quantization, dtype)
    key = None if cache is None else _cache_key(files, spec, wanted)
    if cache is not None and key is not None:
        stored = cache.open(key)
        if stored is not None:
            try:
                return _from_stored(spec, stored, ())
            except UnfitError as error:
                cache.reject(key, error)
    packer = _Packer(files, spec, wanted)
    while True:
        try:
            return packer.pack(cache, key)
        except NoCodesError as error:
            packer.keep_float(error.name)


def native_weight_bytes(files: ModelFiles, spec: ModelSpec, quantization: str, dtype: torch.dtype) -> int:
    """Return the bytes that `load_native_weights` would load, from the files' headers. Raises ModelFileError.

    A weight that packing finds to have no codes stays float, but is counted here as coded.
    """
    return _Packer(files, spec, wanted_tensors(quantization, dtype)).num_bytes()


def wanted_tensors(quantization: str, dtype: torch.dtype) -> WantedTensor:
    """Return the kinds of packed weights: `quantization` for matrices, `dtype` for those that stay float."""
    return WantedTensor(quantization, WeightKind.BFLOAT16 if dtype == torch.bfloat16 else WeightKind.FLOAT32)


def _cache_key(files: ModelFiles, spec: ModelSpec, wanted: WantedTensor) -> CacheKey:
    """Make the key from the files and from the fields of the specification that describe tensors."""
    facts = [(entry.name, getattr(spec, entry.name)) for entry in fields(spec) if entry.name not in _UNRELATED_FIELDS]
    paths = [*files.weights, *(files.root.glob(INDEX_FILE) if files.kind == "hf" else ())]
    try:
        return CacheKey.of(paths, facts, wanted.quantization, int(wanted.float_kind), sys.byteorder, packing_version())
    except OSError as error:
        raise ModelFileError(files.weights[0], f"cannot be read ({error.strerror or error})") from error


def _section(name: str, index: int) -> str:
    return f"{name}.{index}"


def _from_stored(spec: ModelSpec, stored: StoredWeights, notes: tuple[str, ...]) -> NativeWeights:
    """Return the weights in a mapped file, without copying. Raises UnfitError if they are not this model's."""
    matrices, sizes = _layout(spec)
    match stored.about:
        case {"shapes": dict(shapes), "vectors": list(names), "notes": list(kept)}:
            is_whole = shapes.keys() == matrices.keys() and {*map(str, names)} == sizes.keys()
        case _:
            is_whole = False
    if not is_whole:
        raise UnfitError("its header lists other weights than the model has")
    packed = {name: _matrix(stored, name, entries, matrices[name]) for name, entries in shapes.items()}
    vectors = {name: _aligned(stored, name, 4 * size).view(np.float32) for name, size in sizes.items()}
    return _assemble(spec, packed, vectors, (*map(str, kept), *notes))


def _matrix(
    stored: StoredWeights, name: str, entries: object, size: tuple[int, int]
) -> list[tuple[WeightShape, Bytes]]:
    """Return the packed parts of one linear layer of `size` (rows, inputs) in a file. Raises UnfitError."""
    parts: list[tuple[WeightShape, Bytes]] = []
    rows = 0
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        match entry:
            case [int(kind), int(outputs), int(inputs), int(group)] if (
                outputs > 0 and inputs == size[1] and _is_kind(kind, inputs, group)
            ):
                shape = WeightShape(WeightKind(kind), outputs, inputs, group)
            case _:
                raise UnfitError(f"its header has a wrong shape for {name}")
        rows += outputs
        if rows > size[0]:  # before nbytes, which would overflow
            break
        parts.append((shape, _aligned(stored, _section(name, index), shape.nbytes)))
    if rows != size[0]:
        raise UnfitError(f"its header has {rows} rows for {name}, the model {size[0]}")
    return parts


def _is_kind(kind: int, inputs: int, group: int) -> bool:
    """Return True for a kind and group that weights with this number of inputs can have."""
    if kind in (WeightKind.FLOAT32, WeightKind.BFLOAT16):
        return group == 0
    return (kind, group) in code_kinds() and inputs % group == 0


def _aligned(stored: StoredWeights, name: str, nbytes: int) -> Bytes:
    """Return the section of this name. Raises UnfitError if it has another size or lacks the kernels' alignment."""
    section = stored.sections.get(name)
    if section is None or len(section) != nbytes or section.ctypes.data % ALIGNMENT:
        raise UnfitError(f"its section {name} has another size than the model needs")
    return section


def _layout(spec: ModelSpec) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return the model's parts: rows and inputs of each linear layer, and the size of each vector."""
    table = (spec.vocab_size, spec.hidden_size)
    matrices = {"embedding": table} if spec.tie_word_embeddings else {"embedding": table, "head": table}
    vectors = {"final_norm": spec.hidden_size}
    if spec.rope_factors_tensor is not None:
        vectors["rope_factors"] = spec.head_dim // 2
    norms = layer_norms(spec)
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        matrices |= {prefix + name: linear_shape(spec, name) for name in LINEARS}
        vectors |= {prefix + role: size for role, size in norms.items()}
        if spec.attention_bias:
            vectors[f"{prefix}qkv.bias"] = matrices[f"{prefix}qkv"][0]
    return matrices, vectors


def _assemble(
    spec: ModelSpec,
    packed: Mapping[str, list[tuple[WeightShape, Bytes]]],
    vectors: Mapping[str, Vector],
    notes: tuple[str, ...],
) -> NativeWeights:
    """Build the weights from packed buffers and vectors by name."""

    def matrix(name: str) -> tuple[PackedWeight, ...]:
        bias, start, weights = vectors.get(f"{name}.bias"), 0, []
        for shape, buffer in packed[name]:
            weights.append(PackedWeight(shape, buffer, None if bias is None else bias[start : start + shape.outputs]))
            start += shape.outputs
        return tuple(weights)

    layers = []
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        matrices = {name: matrix(prefix + name) for name in LINEARS}
        norms = {role: vectors[prefix + role] for role in layer_norms(spec)}
        layers.append(NativeLayer(**matrices, **norms))  # type: ignore[arg-type]
    (embedding,) = matrix("embedding")
    (head,) = (embedding,) if spec.tie_word_embeddings else matrix("head")
    return NativeWeights(tuple(layers), embedding, head, vectors["final_norm"], vectors.get("rope_factors"), notes)


@dataclass(slots=True)
class _Plan:
    """The weights to pack: each linear layer's runs by name, in packing order; and the values of every vector."""

    runs: dict[str, tuple[WeightRun, ...]]
    vectors: dict[str, Vector]
    notes: tuple[str, ...] = ()


class _Packer:
    """Packs the weights of open files."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, wanted: WantedTensor) -> None:
        self._spec = spec
        self._family = FAMILIES[spec.family]
        self._weights = open_weights(files, spec)
        self._wanted = wanted

    def keep_float(self, name: str) -> None:
        """Keep this tensor as floats, because it has no codes."""
        self._wanted = replace(self._wanted, float_names=self._wanted.float_names | {name})

    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(run.shape.nbytes for runs in self._plan().runs.values() for run in runs)

    def pack(self, cache: WeightCache | None, key: CacheKey | None) -> NativeWeights:
        """Pack into a file and map it, or into memory if no file can be written. Raises NoCodesError."""
        plan = self._plan()
        if cache is None or key is None:
            return self._in_memory(plan, ())
        shapes = {name: [run.shape for run in runs] for name, runs in plan.runs.items()}
        about = {
            "shapes": {name: [astuple(shape) for shape in list_] for name, list_ in shapes.items()},
            "vectors": list(plan.vectors),
            "notes": plan.notes,
        }
        sizes = {
            _section(name, index): shape.nbytes for name, list_ in shapes.items() for index, shape in enumerate(list_)
        }
        sizes |= {name: vector.nbytes for name, vector in plan.vectors.items()}
        stored = cache.write(key, about, sizes, partial(self._sections, plan))
        if stored is None:
            return self._in_memory(plan, tuple(cache.notes))
        return _from_stored(self._spec, stored, tuple(cache.notes))

    def _in_memory(self, plan: _Plan, notes: tuple[str, ...]) -> NativeWeights:
        with contextlib.closing(self._buffers(plan)) as buffers:
            packed = {name: [(run.shape, next(buffers)) for run in runs] for name, runs in plan.runs.items()}
        return _assemble(self._spec, packed, plan.vectors, (*plan.notes, *notes))

    def _sections(self, plan: _Plan) -> Generator[Bytes, None, None]:
        yield from self._buffers(plan)
        for vector in plan.vectors.values():
            yield vector.view(np.uint8)

    def _buffers(self, plan: _Plan) -> Generator[Bytes, None, None]:
        runs = [run for list_ in plan.runs.values() for run in list_]
        return pack_runs(self._weights, runs, torch.get_num_threads())

    def _plan(self) -> _Plan:
        """Choose every weight's kind and read every vector. Raises ModelFileError for a tensor of another shape."""
        spec, wanted = self._spec, self._wanted
        plan = _Plan({}, {})
        table = replace(wanted, quantization=TABLES.get(wanted.quantization, wanted.quantization))
        head = f"{self._family.tensor('head')}.weight"
        for role in ("embedding",) if spec.tie_word_embeddings else ("embedding", "head"):
            rows = {f"{self._family.tensor(role)}.weight": spec.vocab_size}
            plan.runs[role] = plan_runs(self._weights, rows, spec.hidden_size, table)
        for index in range(spec.num_layers):
            self._plan_layer(plan, f"layers.{index}.", index)
        plan.vectors["final_norm"] = self._norm("final_norm", None, spec.hidden_size)
        if spec.rope_factors_tensor is not None:
            plan.vectors["rope_factors"] = self._vector(spec.rope_factors_tensor, spec.head_dim // 2)
        self._weights.check_all_read(frozenset({head}) if spec.tie_word_embeddings else frozenset())
        plan.notes = self._notes(plan)
        return plan

    def _plan_layer(self, plan: _Plan, prefix: str, layer: int) -> None:
        spec = self._spec
        for name in LINEARS:
            tensors = linear_tensors(spec, name, layer)
            rows = {f"{tensor}.weight": count for tensor, count in tensors.items()}
            plan.runs[prefix + name] = plan_runs(self._weights, rows, linear_shape(spec, name)[1], self._wanted)
            if name == "qkv" and spec.attention_bias:
                biases = [self._vector(f"{tensor}.bias", count) for tensor, count in tensors.items()]
                plan.vectors[f"{prefix}{name}.bias"] = np.concatenate(biases)
        for role, size in layer_norms(spec).items():
            weight = self._norm(role, layer, size)
            if role == "q_norm" and spec.query_scalar is not None:  # attention divides by the root of the head size
                weight = weight * np.float32((spec.head_dim / spec.query_scalar) ** 0.5)
            plan.vectors[prefix + role] = weight

    def _vector(self, name: str, size: int) -> Vector:
        self._weights.check_shape(name, (size,))
        values = torch.empty(size, dtype=torch.float32)
        self._weights.read_into(name, values)
        return values.numpy()

    def _norm(self, role: str, layer: int | None, size: int) -> Vector:
        return self._vector(f"{self._family.tensor(role, layer)}.weight", size) + np.float32(self._family.norm_offset)

    def _notes(self, plan: _Plan) -> tuple[str, ...]:
        """Return a note about linear layers that stay float although codes were requested."""
        if self._wanted.quantization not in ("int8", "int4"):
            return ()
        floats = [name for name, runs in plan.runs.items() for run in runs if run.shape.group == 0]
        if not floats:
            return ()
        kind = self._wanted.float_kind.name.lower()
        return (f"{len(floats)} of {len(plan.runs)} weights stay {kind}, {floats[0]} the first: they have no codes",)
