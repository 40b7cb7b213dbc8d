"""The weights of a native decoder: packed linear layers, float32 vectors.

Owns: the fields of a layer; the packed weights that each linear layer consists of; packing these weights or mapping
them from the cache.
Does not: compute, or know a packed layout.
Invariants: a linear layer consists of packed weights over consecutive runs of output rows, in order. It has more than
one packed weight only if its tensors have different kinds. Vectors are contiguous float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
from collections.abc import Generator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from octavo.artifacts.families import FAMILIES, has_bias, layer_linears, layer_norms, linear_shape, linear_tensors
from octavo.artifacts.family import LINEARS, MIXTURE_LINEARS, SHARED_LINEARS
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_quantization
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.models.native_mixture import NativeExperts, NativeMixture
from octavo.nn.packed_weight import ALIGNMENT, Bytes, PackedWeight, WeightKind, WeightShape
from octavo.nn.packing import (
    NoCodesError,
    WantedTensor,
    WeightRun,
    code_kinds,
    pack_runs,
    packing_version,
    plan_runs,
    recoding_notes,
)
from octavo.nn.weight_cache import CacheKey, StoredWeights, UnfitError, WeightCache
from octavo.nn.weights import INDEX_FILE, ReadOptions, open_weights

Vector = npt.NDArray[np.float32]

TABLES = {"int4": "int8"}  # the embedding and the head lose too much at 4 bits
_ROUTER = WantedTensor("none", WeightKind.FLOAT32)  # rounding would change which experts are chosen
_UNRELATED_FIELDS = ("generation", "eos_token_ids", "bos_token_id", "max_model_len", "notes")


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer: its packed weights, which include biases, and its vectors by name.

    Vectors are the norms of layer_norms(spec), `<norm>.bias` where a family has them, and attention's `sinks`. Weights
    of norms include the family's offset, in float32. A fused layer's first weight computes the first outputs. A layer
    with a mixture of experts has no `gate_up` and no `down`.
    """

    qkv: tuple[PackedWeight, ...]
    output: tuple[PackedWeight, ...]
    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    vectors: Mapping[str, Vector]
    mixture: NativeMixture | None = None

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        """Every packed weight."""
        of_mixture = () if self.mixture is None else self.mixture.parts
        return (*self.qkv, *self.output, *self.gate_up, *self.down, *of_mixture)


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The weights of a model. A tied head and the embedding are one object. `notes` are sentences for the user.

    `vectors` has the final norm, its bias if it has one, and the `rope_factors` of GGUF files.
    """

    layers: tuple[NativeLayer, ...]
    embedding: PackedWeight
    head: PackedWeight
    vectors: Mapping[str, Vector]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights; a tied head counts once."""
        tables = self.embedding.nbytes + (0 if self.head is self.embedding else self.head.nbytes)
        return tables + sum(weight.nbytes for layer in self.layers for weight in layer.parts)


def load_native_weights(
    files: ModelFiles,
    spec: ModelSpec,
    quantization: str,
    dtype: torch.dtype,
    cache: WeightCache | None = None,
    options: ReadOptions | None = None,
) -> NativeWeights:
    """Pack the model's weights, or map them from `cache`; without a cache, pack into memory. Raises ModelFileError.

    `quantization` is "none", "int8", "int4", or "auto" for the files' own codes (see packing.choose_quantization).
    `dtype` applies to weights that stay float: bfloat16, or else float32, which represents float16 exactly.
    """
    wanted = wanted_tensors(quantization, dtype)
    key = None if cache is None else _cache_key(files, spec, wanted, options)
    if cache is not None and key is not None:
        stored = cache.open(key)
        if stored is not None:
            try:
                return _from_stored(spec, stored, ())
            except UnfitError as error:
                cache.reject(key, error)
    packer = _Packer(files, spec, wanted, options)
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


def _cache_key(files: ModelFiles, spec: ModelSpec, wanted: WantedTensor, options: ReadOptions | None) -> CacheKey:
    """Make the key from the files and from the fields of the specification that describe tensors."""
    declared = read_quantization(files.root) if files.kind == "hf" else None
    facts = [(entry.name, getattr(spec, entry.name)) for entry in fields(spec) if entry.name not in _UNRELATED_FIELDS]
    paths = [*files.weights, *(files.root.glob(INDEX_FILE) if files.kind == "hf" else ())]
    try:
        return CacheKey.of(
            paths,
            *(facts, declared, wanted.quantization, int(wanted.float_kind), sys.byteorder, packing_version()),
            *_imatrix_digest(options),
        )
    except OSError as error:
        raise ModelFileError(files.weights[0], f"cannot be read ({error.strerror or error})") from error


def _imatrix_digest(options: ReadOptions | None) -> tuple[str, ...]:
    """Return the digest of the importance matrix; () without one. Raises ModelFileError."""
    if options is None or options.imatrix is None:
        return ()
    try:
        return (hashlib.sha256(options.imatrix.read_bytes()).hexdigest(),)
    except OSError as error:
        raise ModelFileError(options.imatrix, f"cannot be read ({error.strerror or error})") from error


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
    vectors = _with_bias(spec, {"final_norm": spec.hidden_size})
    if spec.rope_factors_tensors:
        vectors["rope_factors"] = len(spec.rope_factors_tensors) * (spec.rope_dim // 2)
    norms = _with_bias(spec, layer_norms(spec))
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        linears = layer_linears(spec, index)
        matrices |= {prefix + name: linear_shape(spec, name) for name in linears}
        vectors |= {prefix + role: size for role, size in (norms | _sinks(spec)).items()}
        vectors |= {f"{prefix}{name}.bias": matrices[prefix + name][0] for name in linears if has_bias(spec, name)}
        if spec.mixture is not None and spec.mixture.has_choice_bias and "router" in linears:
            vectors[f"{prefix}choice_bias"] = spec.mixture.num_experts
    return matrices, vectors


def _sinks(spec: ModelSpec) -> dict[str, int]:
    """Return the size of a layer's attention sinks, if the family has them."""
    return {"sinks": spec.num_heads} if FAMILIES[spec.family].has("sinks") else {}


def _with_bias(spec: ModelSpec, norms: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of norms' weights and, if the family has them, of their biases."""
    biases = norms if FAMILIES[spec.family].norm_bias else {}
    return {**norms, **{f"{role}.bias": size for role, size in biases.items()}}


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
        matrices = {name: matrix(prefix + name) for name in layer_linears(spec, index)}
        norms = {role: vectors[prefix + role] for role in _with_bias(spec, layer_norms(spec)) | _sinks(spec)}
        dense = {name: matrices.get(name, ()) for name in LINEARS}
        mixture = _mixture(matrices, vectors.get(f"{prefix}choice_bias"))
        layers.append(NativeLayer(**dense, vectors=norms, mixture=mixture))
    (embedding,) = matrix("embedding")
    (head,) = (embedding,) if spec.tie_word_embeddings else matrix("head")
    ends = {name: vectors[name] for name in ("final_norm", "final_norm.bias", "rope_factors") if name in vectors}
    return NativeWeights(tuple(layers), embedding, head, ends, notes)


def _mixture(matrices: Mapping[str, tuple[PackedWeight, ...]], choice_bias: Vector | None) -> NativeMixture | None:
    """Build a layer's mixture of experts from its matrices, of which each is one packed weight."""
    if "router" not in matrices:
        return None
    (router,) = matrices["router"]
    routed, shared = (
        NativeExperts(*(matrices[name][0] for name in names)) if names[0] in matrices else None
        for names in (tuple(MIXTURE_LINEARS)[1:], tuple(SHARED_LINEARS))
    )
    assert routed is not None, "a router chooses experts"
    return NativeMixture(router, routed, shared, choice_bias)


@dataclass(slots=True)
class _Plan:
    """The weights to pack: each linear layer's runs by name, in packing order; and the values of every vector."""

    runs: dict[str, tuple[WeightRun, ...]]
    vectors: dict[str, Vector]
    notes: tuple[str, ...] = ()


class _Packer:
    """Packs the weights of open files."""

    def __init__(
        self, files: ModelFiles, spec: ModelSpec, wanted: WantedTensor, options: ReadOptions | None = None
    ) -> None:
        self._spec = spec
        self._family = FAMILIES[spec.family]
        self._weights = open_weights(files, spec, options)
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
        self._plan_norms(plan, "", None, {"final_norm": spec.hidden_size})
        if spec.rope_factors_tensors:
            factors = [self._vector(name, spec.rope_dim // 2) for name in spec.rope_factors_tensors]
            plan.vectors["rope_factors"] = np.concatenate(factors)
        self._weights.check_all_read(frozenset({head}) if spec.tie_word_embeddings else frozenset())
        plan.notes = self._notes(plan)
        return plan

    def _plan_layer(self, plan: _Plan, prefix: str, layer: int) -> None:
        spec = self._spec
        for name in (linears := layer_linears(spec, layer)):
            tensors = linear_tensors(spec, name, layer)
            rows = {f"{tensor}.weight": count for tensor, count in tensors.items()}
            wanted = _ROUTER if name == "router" else self._wanted
            plan.runs[prefix + name] = plan_runs(self._weights, rows, linear_shape(spec, name)[1], wanted)
            if has_bias(spec, name):
                biases = [self._vector(f"{tensor}.bias", count) for tensor, count in tensors.items()]
                plan.vectors[f"{prefix}{name}.bias"] = np.concatenate(biases)
        if spec.mixture is not None and spec.mixture.has_choice_bias and "router" in linears:
            name = f"{self._family.tensor('choice_bias', layer)}.bias"
            plan.vectors[f"{prefix}choice_bias"] = self._vector(name, spec.mixture.num_experts)
        for role, size in _sinks(spec).items():
            plan.vectors[prefix + role] = self._vector(f"{self._family.tensor(role, layer)}.weight", size)
        self._plan_norms(plan, prefix, layer, layer_norms(spec))

    def _plan_norms(self, plan: _Plan, prefix: str, layer: int | None, norms: Mapping[str, int]) -> None:
        offset = np.float32(self._family.norm_offset)
        for role, size in norms.items():
            name = self._family.tensor(role, layer)
            plan.vectors[prefix + role] = self._vector(f"{name}.weight", size) + offset
            if self._family.norm_bias:
                plan.vectors[f"{prefix}{role}.bias"] = self._vector(f"{name}.bias", size)

    def _vector(self, name: str, size: int) -> Vector:
        return self._weights.read({name: size}).numpy()

    def _notes(self, plan: _Plan) -> tuple[str, ...]:
        """Return the notes about tensors, codes made anew, and linear layers that stay float against the request."""
        notes = self._weights.notes
        if self._wanted.quantization == "auto":
            return (*notes, *recoding_notes(self._weights, itertools.chain.from_iterable(plan.runs.values())))
        if self._wanted.quantization == "none":
            return notes
        floats = [
            name
            for name, runs in plan.runs.items()
            for run in runs
            if run.shape.group == 0 and not name.endswith(".router")
        ]
        if not floats:
            return notes
        kind = self._wanted.float_kind.name.lower()
        return (
            *notes,
            f"{len(floats)} of {len(plan.runs)} weights stay {kind}, {floats[0]} the first: they have no codes",
        )
