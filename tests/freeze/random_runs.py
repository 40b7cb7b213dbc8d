"""Random but reproducible runs of a scheduler through its public verbs, recorded step by step.

Owns: how a seed becomes limits, requests, verbs and faults; the record of each verb, and the features a run met.
Does not: judge what the scheduler decides (tests/core does). A run's first differing record is what changed.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

from tests.freeze import core_names as names
from tests.freeze.core_names import (
    FinishReason,
    InvariantError,
    Limits,
    OctavoError,
    Request,
    SamplingParams,
    Scheduler,
    Span,
    StepFailure,
    StepPlan,
    Want,
)
from tests.freeze.scripted import HABIT, Faults, Maker, Mirror, SlotState, number

VOCAB_SIZE = 31
EOS = 2
MOST_STEPS = 4000
GROUPS = ((0,), (0,), (0,), (0, 5), (0, 3), (0, 9), (4,), (7,), (3, 8), (0, 4, 11))
ITEMS = {b"cat": 2, b"cow": 2, b"dog": 3, b"elk": 3, b"sun": 5, b"sea": 8}
TENANTS = ("", "acme", "zeta")


def random_limits(seed: int, rng: random.Random) -> Limits:
    """A small engine in which blocks, slots and tokens are scarce; policies take turns."""
    block_size = rng.choice((1, 2, 3, 4, 4, 8))
    max_model_len = rng.randrange(16, 65)
    longest = -(-max_model_len // block_size)
    max_batch_tokens = rng.choice((1, 3, 8, 16, 16, 32, 64, 64))
    groups = tuple(names.group(window) for window in rng.choice(GROUPS))
    scarcity = rng.uniform(1.0, rng.choice((1.1, 1.4, 2.5)))
    num_blocks = tuple(
        max(1, int(group.peak_blocks(max_model_len, max_batch_tokens, block_size) * scarcity)) for group in groups
    )
    host = rng.choice((0.0, 0.5, 1.0, 2.0))
    has_encoder = rng.random() < 0.45
    return Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        groups=groups,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_batch_tokens=max_batch_tokens,
        max_sequences=rng.choice((1, 3, 4, 4, 6, 8, 8, 12)),
        policy=rng.choice(("fcfs", *2 * (names.ALL_POLICIES[seed % len(names.ALL_POLICIES)],))),
        headroom=rng.choice((None, 0.0, 0.0, 0.0, 0.1, 0.3)),
        chunked_prefill=rng.random() < 0.65 or max_batch_tokens < 16,
        max_partial_prefills=rng.choice((0, 0, 0, 1, 2)),
        long_prefill_threshold=rng.choice((0, 0, 0, 2, 5)),
        prefix_caching=rng.random() < 0.75,
        block_sharing=rng.random() < 0.8,
        max_blocks_per_sequence=rng.choice((0, 0, 2, longest)),
        preemption=rng.choice(("auto", "recompute", "swap", "swap")),
        host_blocks=tuple(int(count * host) for count in num_blocks) if host else (),
        host_load_min_tokens=rng.choice((0, 1, 4, 16)),
        max_kv_read=rng.choice((0, 0, 0, rng.randrange(4, 2 * max_model_len))),
        max_bypass=rng.choice((1, 2, 5, 64)),
        encoder_budget=rng.choice((5, 8, 8, 12)) if has_encoder else 0,
        encoder_cache=rng.choice((5, 8, 8, 12)) if has_encoder else 0,
        adapter_slots=rng.choice((0, 0, 1, 2)),
        separate_modalities=rng.random() < 0.3,
        composition=rng.choice(("mixed", "mixed", "mixed", "separate")),
        max_prefill_run=rng.choice((1, 2, 4)),
        tenant_weights=(("acme", 2.0),) if rng.random() < 0.5 else (),
        find_shared_prefixes=rng.random() < 0.3,
        max_draft_tokens=rng.choice((0, 0, 1, 3, 7)),
        max_draft_rows=rng.choice((1, 2, 4, 8)),
    )


def _sampling(params: dict[str, Any]) -> SamplingParams:
    """The parameters, without what may not be asked for together."""
    if params.get("beam_width"):
        params.pop("grammar", None)
    if params.get("grammar"):
        params = {name: value for name, value in params.items() if name not in ("ignore_eos", "min_tokens")}
    if params["max_tokens"] is not None:
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    return SamplingParams(**params)


class RequestMaker:
    """Random requests for one engine."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        self.rng, self.limits = rng, limits
        self.prefixes = [[rng.randrange(3, VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
        self.keys = tuple(rng.randbytes(16) for _ in range(64))
        self.has_time_limits = rng.random() < 0.35
        self.several, self.beams = rng.choice((0.0, 0.15, 0.4)), rng.choice((0.0, 0.1, 0.3))
        self.num_made = 0

    def make(self, now: float) -> Request:
        """The next request."""
        rng, size, longest = self.rng, self.limits.block_size, self.limits.max_model_len
        name = f"r{self.num_made}"
        self.num_made += 1
        length = rng.randrange(1, longest + 2 if rng.random() < 0.15 else longest // 3 + 2)
        if rng.random() < 0.6:
            length = max(1, length // size * size)
        shared = rng.choice((0, length, length, rng.randrange(length + 1)))
        ids = rng.choice(self.prefixes)[:shared]
        ids += [rng.randrange(3, VOCAB_SIZE) for _ in range(length - len(ids))]
        params: dict[str, Any] = {"max_tokens": rng.choice((None, None, 1, 2, 5, 9, 14, 20)), "seed": self._seed()}
        fields: dict[str, Any] = {"arrival": now, "eos_token_ids": (EOS,), "tenant": rng.choice(TENANTS)}
        self._add_options(params, fields, now)
        kind = rng.random()
        if kind < 0.06:
            fields["num_prompt_tokens"] = length
            fields["block_keys"] = self.keys[: length // size] if rng.random() < 0.7 else None
            return Request(name, None, _sampling(params), **fields)
        if kind < 0.14:
            self._add_emitted(length, params, fields)
        elif kind < 0.14 + self.several:
            params["n"] = rng.choice((2, 2, 3, 4))
            if rng.random() < 0.4:
                params["best_of"] = params["n"] + rng.randrange(3)
        elif kind < 0.14 + self.several + self.beams:
            self._add_beams(params)
        elif kind > 0.92:
            fields["wants"] = rng.choice((Want.POOL, Want.SCORE, Want.SCORE | Want.SAMPLE))
            fields["score_from"] = rng.randrange(1, length + 1)
        if self.limits.encoder_budget and rng.random() < 0.5:
            fields["spans"] = self._spans(ids)
        return Request(name, array("i", ids), _sampling(params), **fields)

    def _seed(self) -> int:
        drafts_hit = self.limits.max_draft_tokens and self.rng.random() < 0.7
        return self.rng.randrange(3) + HABIT * bool(drafts_hit)

    def _add_options(self, params: dict[str, Any], fields: dict[str, Any], now: float) -> None:
        rng = self.rng
        for chance, to, name, value in (
            (0.6, params, "ignore_eos", True),
            (0.2, params, "stop_token_ids", (rng.randrange(3, VOCAB_SIZE),)),
            (0.1, params, "min_tokens", rng.randrange(4)),
            (0.1, params, "presence_penalty", 0.5),
            (0.1, params, "grammar", "a grammar"),
            (0.1, fields, "cache_salt", b"salt"),
            (0.3, fields, "priority", rng.randrange(-2, 3)),
            (0.2, fields, "ttft_objective", rng.random()),
            (0.2, fields, "tpot_objective", rng.random() / 10),
            (0.4 * self.has_time_limits, fields, "deadline", now + rng.random()),
            (0.4 * self.has_time_limits, fields, "queue_timeout", rng.random() / 2),
            (0.4 * bool(self.limits.adapter_slots), fields, "adapter_id", rng.randrange(1, 4)),
        ):
            if rng.random() < chance:
                to[name] = value

    def _add_emitted(self, length: int, params: dict[str, Any], fields: dict[str, Any]) -> None:
        """Make it a request of an earlier epoch that had some of its outputs."""
        count = self.rng.randrange(1, 6)
        ids = [token for at in range(count) if (token := number("emitted", params["seed"], at) % VOCAB_SIZE) > EOS]
        fields["emitted_token_ids"] = array("i", ids)
        if params["max_tokens"] is not None:
            params["max_tokens"] += len(ids)

    def _add_beams(self, params: dict[str, Any]) -> None:
        rng = self.rng
        params["beam_width"] = rng.choice((1, 2, 3, 4))
        params["n"] = rng.randrange(1, params["beam_width"] + 1)
        params["length_penalty"] = rng.choice((1.0, 0.0, 2.0, -1.0))
        params["early_stopping"] = rng.choice((True, False, "never"))
        params["max_tokens"] = rng.choice((1, 2, 5, 9, 14))

    def _spans(self, ids: list[int]) -> tuple[Span, ...]:
        """Put media items into the prompt; their positions hold a placeholder."""
        rng, spans, start = self.rng, [], self.rng.randrange(4)
        while len(spans) < 3:
            key = rng.choice(sorted(ITEMS))
            if start + ITEMS[key] > len(ids):
                break
            spans.append(Span(start, ITEMS[key], key))
            ids[start : start + ITEMS[key]] = [1] * ITEMS[key]
            start += ITEMS[key] + rng.randrange(4)
        return tuple(spans)


class Run:
    """One run: `records` has an entry per verb, `features` what it met."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"freeze {seed}")
        self.limits = random_limits(seed, rng)
        self.depth = 1 + seed % 3
        self.maker = RequestMaker(rng, self.limits)
        self.faults = Faults(random.Random(rng.random()))
        if rng.random() < 0.5:
            self.faults.error, self.faults.nothing = rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.01, 0.05))
            self.faults.dead_end = rng.choice((0.0, 0.005, 0.02))
        self.faults.gives_ids = rng.random() > 0.06
        self.records: list[dict[str, Any]] = []
        self.features: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, array[int]] = {}
        self.open: dict[str, None] = {}
        self.flight: deque[tuple[StepPlan, dict[int, SlotState]]] = deque()
        self.now, self.is_paused, self.is_draining = 0.0, False, False
        self.scheduler, self.mirror = Scheduler(self.limits), Mirror()
        self.apart = random.Random(f"freeze apart {seed}")  # for what is refused and changes nothing
        self.last: StepPlan | None = None  # committed last
        self._note_limits()
        busy = rng.choice((0.1, 0.3, 0.8))
        self.actions = [
            (busy, self.admit), (1.0, self.plan), (0.8, self.commit), (0.04, self.cancel), (0.04, self.end_choice),
            (rng.choice((0.0, 0.03)), self.fail), (rng.choice((0.0, 0.02)), self.run_out_of_memory),
            (rng.choice((0.0, 0.1)), self.plan_some), (0.02, self.reset), (0.02, self.repeat_id),
            (rng.choice((0.0, 0.03)), self.pause), (rng.choice((0.0, 0.0, 0.01)), self.drain),
            (rng.choice((0.0, 0.02)), self.jump), (rng.choice((0.0, 0.0, 0.015)), self.restart),
            (0.3, self.pass_time), (0.03, self.read_statistics),
        ]  # fmt: skip

    def drive(self, num_actions: int = 160) -> Run:
        """Random verbs, then everything runs to its end without faults."""
        weights = [weight for weight, _ in self.actions]
        for _ in range(num_actions):
            self.rng.choices(self.actions, weights)[0][1]()
            if self.apart.random() < 0.03:
                self.commit_wrongly()
        self.settle()
        self.read_statistics()
        return self

    def settle(self) -> None:
        """End the pause and all faults; everything must end within a bound."""
        self.faults = Faults(random.Random(0), gives_ids=self.faults.gives_ids)
        self.scheduler.resume()
        self.scheduler.limit_step(None)
        for _ in range(MOST_STEPS):
            if not self.open and not self.flight:
                return
            self.now += 0.01
            while len(self.flight) < self.depth and not self.plan():
                pass
            self.commit()
        self.note("stuck", open=list(self.open))

    # -- records

    def note(self, verb: str, **values: Any) -> None:
        self.records.append({"verb": verb, "now": self.now, **values})

    def _note_limits(self) -> None:
        limits = self.limits
        self.features |= {
            f"policy {limits.policy}", f"depth {self.depth}", f"preemption {limits.preemption}",
            f"composition {limits.composition}", f"chunked prefill {limits.chunked_prefill}",
            f"prefix caching {limits.prefix_caching}", f"block sharing {limits.block_sharing}",
            f"groups {len(limits.groups)}",
        }  # fmt: skip
        for name in (
            "host_blocks", "max_kv_read", "encoder_budget", "adapter_slots", "separate_modalities", "max_draft_tokens",
            "find_shared_prefixes", "max_partial_prefills", "long_prefill_threshold", "tenant_weights",
            "max_blocks_per_sequence",
        ):  # fmt: skip
            if getattr(limits, name):
                self.features.add(f"limit {name}")
        if any(group.window for group in limits.groups):
            self.features.add("sliding window")
        if not self.faults.gives_ids:
            self.features.add("durations only")

    def _note_events(self, made: list[dict[str, Any]]) -> None:
        for event in made:
            self.features.add(f"event {event['kind']}")
            for name in ("reason", "finish_reason"):
                if name in event:
                    self.features.add(f"{event['kind']} {event[name]}")
            if event["kind"] == "FINISHED":
                self.open.pop(event["request"], None)

    # -- verbs

    def admit(self) -> None:
        if len(self.open) >= 14:
            return
        request = self.maker.make(self.now)
        self.admit_one(request)

    def admit_one(self, request: Request) -> None:
        name = request.request_id
        try:
            admission = self.scheduler.admit(request, self.now)
        except OctavoError as error:
            self.features.add(f"refused {type(error).__name__}")
            self.note("refused", request=name, error=type(error).__name__)
            return
        self.requests[name], self.open[name] = request, None
        self.outputs.setdefault(name, array("i", request.emitted_token_ids or ()))
        self._note_request(request)
        self.note("admit", request=name, max_tokens=admission.max_tokens, capped=admission.capped)

    def _note_request(self, request: Request) -> None:
        params = request.params
        found = {
            "n": params.n > 1 and not params.beam_width, "best_of": params.best_of, "beam search": params.beam_width,
            "grammar": params.grammar, "adapter": request.adapter_id, "spans": request.spans,
            "known by length": request.prompt_token_ids is None, "resumed": request.emitted_token_ids,
            "deadline": request.deadline, "queue_timeout": request.queue_timeout, "priority": request.priority,
            "tenant": request.tenant, "cache_salt": request.cache_salt, "pooled": request.wants & Want.POOL,
            "scored": request.wants & Want.SCORE, "penalty": params.presence_penalty, "min_tokens": params.min_tokens,
            "objectives": request.ttft_objective or request.tpot_objective,
            "given block keys": request.block_keys,
        }  # fmt: skip
        self.features |= {f"request {name}" for name, value in found.items() if value}

    def plan(self, only: frozenset[str] | None = None) -> bool:
        """Make a plan and put it in flight; True when it was empty, or nothing more may be in flight."""
        if len(self.flight) >= self.depth:
            return True
        plan = self.scheduler.plan(self.now, only)
        record = self.mirror.apply(plan)
        made = [names.event_record(event) for event in plan.events]
        record |= {
            "only": only and sorted(only),
            "step": plan.step,
            "at": plan.now,
            "rows": [
                [*self.mirror.name(slot), start, count, flags, drafts]
                for slot, start, count, flags, drafts in names.rows(plan)
            ],
            "id_edits": [[*self.mirror.name(slot), at, token] for slot, at, token in names.triples(plan.id_edits)],
            "copies": sorted(names.triples(plan.copies)),
            "swap_outs": sorted(names.triples(plan.swap_outs)),
            "host_loads": sorted(names.triples(plan.host_loads)),
            "encode": [
                [*self.mirror.name(job.slot), job.span, job.key.hex(), job.num_tokens] for job in plan.encode_jobs
            ],
            "encoder_frees": sorted(key.hex() for key in plan.encoder_frees),
            "shared_prefixes": sorted([count, list(which)] for count, which in plan.shared_prefixes),
            "num_common_blocks": plan.num_common_blocks,
            "finished": sorted(plan.finished_ids),
            "preempted": sorted(plan.preempted_ids),
            "num_query_tokens": plan.num_query_tokens,
            "num_kv_read": plan.num_kv_read,
            "is_fast_path": plan.is_fast_path,
            "waits": sorted([reason.name, count] for reason, count in plan.waits),
            "wake_at": plan.wake_at,
            "events": made,
        }
        self._note_events(made)
        self._note_plan(record)
        self.note("plan", **record)
        if plan.is_empty:
            return True
        self.flight.append((plan, {slot: self.mirror.slots[slot] for slot in plan.slots}))
        return False

    def _note_plan(self, record: dict[str, Any]) -> None:
        for key in (
            "rows", "id_edits", "copies", "swap_outs", "host_loads", "encode", "encoder_frees", "shared_prefixes",
            "num_common_blocks", "preempted", "is_fast_path", "wake_at", "only",
        ):  # fmt: skip
            if record[key]:
                self.features.add(f"plan {key}")
        self.features |= {f"wait {name}" for name, _ in record["waits"]}
        self.features |= {f"flag {flag}" for row in record["rows"] for flag in row[4]}
        if any(row[5] for row in record["rows"]):
            self.features.add("plan drafts")

    def plan_some(self) -> None:
        if self.open:
            self.plan(frozenset(self.rng.sample(list(self.open), self.rng.randrange(1, len(self.open) + 1))))

    def commit(self) -> None:
        if self.flight:
            plan, owners = self.flight.popleft()
            self.features.add(f"in flight {1 + len(self.flight)}")
            result = Maker(plan, owners, self.requests, VOCAB_SIZE).make(self.faults)
            for name in ("errors", "dead_ends", "scores", "pooled"):
                if getattr(result, name):
                    self.features.add(f"result {name}")
            if result.num_token_ids is not None and 0 in result.num_token_ids:
                self.features.add("result without ids")
            self._take(plan, result)

    def fail(self, is_memory: bool = False) -> None:
        """The oldest plan in flight produced nothing; it and all later ones are void."""
        if self.flight:
            plan, _ = self.flight[0]
            self.flight.clear()
            self.features.add("failed step")
            self._take(plan, StepFailure("failed", is_memory))

    def _take(self, plan: StepPlan, outcome: Any) -> None:
        record = names.events_record(self.scheduler.commit(plan, outcome, self.now))
        self.last = plan
        for name, _, position, token in record["tokens"]:
            if position == len(self.outputs[name]):
                self.outputs[name].append(token)
        self._note_events(record["events"])
        if any(position > 0 and choice > 0 for _, choice, position, _ in record["tokens"]):
            self.features.add("several choices give tokens")
        self.note("commit", **record)

    def commit_wrongly(self) -> None:
        """A result that comes twice or out of order is refused, and changes nothing."""
        early = self.flight[-1][0] if len(self.flight) > 1 else None
        for kind, plan in (("late", self.last), ("early", early)):
            if plan is None:
                continue
            try:
                self.scheduler.commit(plan, StepFailure(kind), self.now)
            except InvariantError as error:
                self.features.add(f"{kind} result refused")
                self.note("wrong commit", kind=kind, error=type(error).__name__)
            else:
                self.note("wrong commit", kind=kind, error=None)

    def run_out_of_memory(self) -> None:
        if self.flight:
            num_tokens = self.flight[0][0].num_query_tokens // 2 or None
            self.fail(is_memory=True)
            self.scheduler.limit_step(num_tokens)
            self.features.add("limit_step")
        else:
            self.scheduler.limit_step(None)

    def cancel(self) -> None:
        chosen = [*self.rng.sample(list(self.open), min(len(self.open), self.rng.randrange(1, 3))), "unknown"]
        reason = self.rng.choice((FinishReason.CANCELLED, FinishReason.STOP))
        self.note("cancel", requests=chosen, count=self.scheduler.cancel(chosen, self.now, reason))
        self.take_events()

    def take_events(self) -> None:
        """Hand over what was decided since; half of the time the next plan does it."""
        if self.rng.random() < 0.5:
            made = [names.event_record(event) for event in self.scheduler.take_events()]
            self._note_events(made)
            self.note("events", events=made)
            if made:
                self.features.add("taken events")

    def end_choice(self) -> None:
        for name in self.rng.sample(list(self.open), min(2, len(self.open))):
            choice = self.rng.randrange(self.requests[name].params.num_sequences)
            self.note(
                "end_choice", request=name, choice=choice, ended=self.scheduler.end_choice(name, choice, self.now)
            )
        self.take_events()

    def reset(self) -> None:
        is_reset = self.scheduler.reset_prefix_cache()
        self.features.add(f"reset {is_reset}")
        self.note("reset", is_reset=is_reset)

    def repeat_id(self) -> None:
        for name in list(self.open)[:1]:
            try:
                self.scheduler.admit(self.requests[name], self.now)
            except OctavoError as error:
                self.features.add(f"refused {type(error).__name__}")
                self.note("repeated", error=type(error).__name__)
            else:
                self.outputs[name] = array("i", self.requests[name].emitted_token_ids or ())
                self.note("repeated", error=None)  # it has ended, and the event is still to come

    def pause(self) -> None:
        self.is_paused = not self.is_paused
        if self.is_paused:
            self.scheduler.pause()
        else:
            self.scheduler.resume()
        self.features.add("pause")

    def drain(self) -> None:
        self.scheduler.drain()
        self.is_draining = True
        self.features.add("drain")

    def jump(self) -> None:
        self.now = max(0.0, self.now + self.rng.choice((-0.2, 0.7, 3600.0)))
        self.features.add("clock jump")

    def restart(self) -> None:
        """A new scheduler takes over what is open: behind its outputs, or, of several sequences, from the start."""
        if not self.faults.gives_ids or self.is_draining:
            return
        self.flight.clear()
        self.scheduler, self.mirror = Scheduler(self.limits), Mirror()
        self.is_paused, self.last = False, None
        self.note("restart")
        self.features.add("restart")
        for name in list(self.open):
            request, outputs = self.requests[name], self.outputs[name]
            del self.open[name]
            if outputs and request.params.num_sequences == 1 and not request.params.beam_width:
                request = replace(request, emitted_token_ids=outputs[:])
            self.admit_one(request)

    def pass_time(self) -> None:
        self.now += self.rng.random() * 0.1

    def read_statistics(self) -> None:
        self.note("statistics", **names.statistics_record(self.scheduler))
