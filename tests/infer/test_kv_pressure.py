"""A pool of a few pages under 1,000 random loads: nothing leaks, nothing hangs, and every answer is the solo one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.kv_pages import PageKey, PagePool
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prefix_cache import PrefixCache
from jacobi_llm.infer.request import Request, Sequence
from tests.infer.decoding import decode_ar, make_engine, make_request, random_prompt
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_models import tiny_loaded as build_loaded

ANSWER_LEN = 12
NUM_ENGINES = 20
LOADS_PER_ENGINE = 50
# A load has at most 8 requests of 12 tokens and prompts of 14, which are recomputed a few times.
MAX_STEPS = 300

Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    # Two layers: K/V of the first depend on a token and its position only, whatever stands before it.
    return build_loaded("llama", hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> Answers:
    """Prompts that begin alike, with their solo answers by plain one-token decoding without a cache."""
    draw = random.Random(3)
    stems = [(), *(random_prompt(draw, n) for n in (3, 4, 8, 9))]
    # The same tokens behind other tokens: pages that look alike and are not.
    stems.append(stems[3][4:] + stems[3][4:])
    prompts = {stem + random_prompt(draw, n) for stem in stems for n in (1, 2, 3, 5)} | set(stems[1:])
    found = {prompt: decode_ar(loaded.model, prompt, ANSWER_LEN) for prompt in sorted(prompts)}
    # Second turns, which go on from an answer: the pages of its owner are known up to its last token.
    second_turns = [
        (*prompt, *answer[:n]) for prompt, answer in found.items() for n in (2, 3, 6) if len(prompt) + n < 14
    ]
    return found | {prompt: decode_ar(loaded.model, prompt, ANSWER_LEN) for prompt in second_turns}


@dataclass
class Load:
    """One random load: requests, when they join, and when some are aborted."""

    requests: list[Request]
    join_at: list[int]
    abort_at: dict[str, int]
    error_rate: float

    @classmethod
    def draw(cls, draw: random.Random, answers: Answers) -> Load:
        requests = [
            make_request(
                str(number),
                draw.choice(list(answers)),
                draw.randint(1, ANSWER_LEN),
                window=draw.choice((1, 2, 3, 5, 8)),
                mode=draw.choice(list(DecodeMode)),
                fill=draw.choice((FillPolicy.REPEAT_LAST, FillPolicy.PROMPT_DRAW)),
                seed=draw.randrange(100),
            )
            for number in range(draw.randint(2, 8))
        ]
        return cls(
            requests,
            join_at=[draw.choice((0, 0, 0, 1, 3, draw.randint(0, 20))) for _ in requests],
            abort_at={request.id: draw.randint(0, 15) for request in requests if draw.random() < 0.15},
            error_rate=draw.choice((0.0, 0.3, 1.0)),
        )


def run(engine: LLMEngine, load: Load, answers: Answers, draw: random.Random) -> None:
    """Run ``load`` to its end and check everything that can be checked.

    Raises:
        AssertionError: a wrong answer, a broken invariant, a leak, or no end.
    """
    open_ids = {request.id for request in load.requests}
    for step in range(MAX_STEPS):
        for request, when in zip(load.requests, load.join_at, strict=True):
            if when == step and request.id in open_ids:
                engine.add_request(request)
        for id, when in load.abort_at.items():
            if when == step and id in open_ids:
                engine.abort(id)
                open_ids.discard(id)
        if not open_ids:
            break
        guess(engine, answers, load.error_rate, draw)
        for out in engine.step():
            if out.finished:
                request = load.requests[int(out.request_id)]
                assert list(out.finished.token_ids) == answers[request.prompt_ids][: request.params.max_tokens]
                open_ids.discard(out.request_id)
        engine.check_integrity()
        check_order(engine)
    assert not open_ids, f"no end after {MAX_STEPS} steps"
    assert not engine._sequences
    assert engine.pool.num_free == engine.pool.num_pages, "pages leaked"


def guess(engine: LLMEngine, answers: Answers, error_rate: float, draw: random.Random) -> None:
    """Carry the right answer into the next windows, each token wrong with ``error_rate``: chance hits few."""
    for sequence in engine._sequences.values():
        right = answers[sequence.request.prompt_ids][len(sequence.completion_ids) :]
        sequence.carried = [token if draw.random() >= error_rate else (token + 1) % VOCAB_SIZE for token in right]


def check_order(engine: LLMEngine) -> None:
    """What the scheduler's proof of progress rests on."""
    arrivals = [sequence.arrived_s for sequence in (*engine.scheduler.running, *engine.scheduler.waiting)]
    assert arrivals == sorted(arrivals)
    assert all(not sequence.block_table for sequence in engine.scheduler.waiting)


def small_engine(loaded: LoadedModel, answers: Answers, draw: random.Random) -> LLMEngine:
    page_size = draw.choice((1, 2, 3, 4))
    least = -(-(max(map(len, answers)) + ANSWER_LEN - 1) // page_size)
    return make_engine(
        loaded,
        num_pages=least + draw.choice((0, 0, 1, 2)),
        page_size=page_size,
        max_num_rows=draw.choice((3, 9, 2048)),
        max_prefill_rows=draw.choice((1, 4, 512)),
        max_num_seqs=draw.choice((2, 64)),
    )


def test_a_thousand_loads_on_a_few_pages(loaded: LoadedModel, answers: Answers) -> None:
    num_preemptions, num_hit_tokens = run_engines(loaded, answers, NUM_ENGINES)
    assert num_preemptions > 300
    assert num_hit_tokens > 3000


def run_engines(loaded: LoadedModel, answers: Answers, num_engines: int) -> tuple[int, int]:
    """Run ``LOADS_PER_ENGINE`` loads on each of some engines; return how many preemptions and prefix hits they had."""
    num_preemptions = num_hit_tokens = 0
    for number in range(num_engines):
        draw = random.Random(number)
        engine = small_engine(loaded, answers, draw)
        for _ in range(LOADS_PER_ENGINE):
            run(engine, Load.draw(draw, answers), answers, draw)
        num_preemptions += engine.scheduler.num_preemptions
        num_hit_tokens += engine.scheduler.num_hit_tokens
    return num_preemptions, num_hit_tokens


# ---------------------------------------------------------------- the checks above can fail


def offer_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page becomes known while its last token has no K/V yet."""
    offer = PrefixCache.offer

    def early(self: PrefixCache, sequence: Sequence) -> None:
        sequence.num_proven += 1
        offer(self, sequence)
        sequence.num_proven -= 1

    monkeypatch.setattr(PrefixCache, "offer", early)


def write_into_a_shared_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose tokens are all known recomputes the last one, in the page it shares."""

    def find(self: PrefixCache, sequence: Sequence) -> None:
        num_pages = sequence.committed_len // self.pool.page_size
        self._extend_keys(sequence, num_pages)
        self.pool.share(sequence.block_table, sequence.page_keys[:num_pages])
        sequence.num_offered_pages = len(sequence.block_table)
        num_found = len(sequence.block_table) * self.pool.page_size
        sequence.num_computed = sequence.num_proven = min(num_found, sequence.committed_len - 1)

    monkeypatch.setattr(PrefixCache, "find", find)


def drop_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a page that is held does not count."""
    share = PagePool.share

    def uncounted(self: PagePool, block_table: list[int], keys: list[PageKey]) -> None:
        share(self, block_table, keys)
        for page in block_table:
            if self._num_holders[page] > 1:
                self._num_holders[page] -= 1

    monkeypatch.setattr(PagePool, "share", uncounted)


def forget_what_stands_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is known by its own tokens alone."""
    of = PageKey.of
    monkeypatch.setattr(PageKey, "of", lambda parent, token_ids: of(b"", token_ids))


def claim_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes the slot behind the pages it found for computed."""
    find = PrefixCache.find

    def boastful(self: PrefixCache, sequence: Sequence) -> None:
        find(self, sequence)
        if sequence.block_table and sequence.num_pending > 1:
            sequence.num_computed += 1
            sequence.num_proven += 1

    monkeypatch.setattr(PrefixCache, "find", boastful)


@pytest.mark.parametrize(
    "plant",
    [
        offer_one_token_early,
        write_into_a_shared_page,
        drop_a_reference,
        forget_what_stands_before,
        claim_a_token_too_many,
    ],
)
@pytest.mark.parametrize("looks_inside", [True, False])
def test_planted_faults_are_seen(
    loaded: LoadedModel,
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    looks_inside: bool,
) -> None:
    """By the invariants, and where those look away, by wrong answers."""
    plant(monkeypatch)
    if not looks_inside:
        monkeypatch.setattr(LLMEngine, "check_integrity", lambda self: None)
    with pytest.raises(AssertionError):
        run_engines(loaded, answers, num_engines=4)


# ---------------------------------------------------------------- field cases with shared prefixes


def test_d17_two_pages_and_a_queue_behind_the_one_that_fills_them(loaded: LoadedModel, answers: Answers) -> None:
    """The first fills the pool; small ones wait behind it; long ones then take the pages from each other."""
    draw = random.Random(1)
    large = next(prompt for prompt in answers if len(prompt) == 13)
    small = [prompt for prompt in answers if len(prompt) <= 5]
    requests = [make_request("0", large, 12, window=4)]
    requests += [make_request(str(n), prompt, 2, window=2) for n, prompt in enumerate(small, 1)]
    requests += [make_request(str(n), prompt, 12, window=8) for n, prompt in enumerate(small, len(requests))]
    engine = make_engine(loaded, num_pages=2, page_size=12)
    run(engine, Load(requests, [0] * len(requests), {}, 0.5), answers, draw)
    assert engine.scheduler.num_preemptions > 0


def test_d13_rows_that_accept_different_counts_in_shared_pages(loaded: LoadedModel, answers: Answers) -> None:
    """Equal prompts, one page of prefix: one request is always right, one never, one ends early."""
    prompt = max(answers, key=len)
    engine = make_engine(loaded, page_size=4)
    run(engine, Load([make_request("0", prompt, 1)], [0], {}, 0.0), answers, random.Random(0))
    for request, error_rate in [("right", 0.0), ("wrong", 1.0)]:
        engine.add_request(make_request(request, prompt, 12, window=8))
        engine._sequences[request].carried = [
            token if error_rate == 0.0 else (token + 1) % VOCAB_SIZE for token in answers[prompt]
        ]
    engine.add_request(make_request("short", prompt, 2, window=8))
    finished = {}
    while len(finished) < 3:
        finished.update({out.request_id: out.finished for out in engine.step() if out.finished})
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            assert sequence.num_computed == sequence.committed_len - 1
    assert {id: list(output.token_ids) for id, output in finished.items()} == {
        "right": answers[prompt],
        "wrong": answers[prompt],
        "short": answers[prompt][:2],
    }
    assert engine.scheduler.num_hit_tokens == 3 * 4 * ((len(prompt) - 1) // 4)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_d11_shared_pages_across_the_sliding_window(family: str) -> None:
    """The window of 8 is crossed inside a block, with the prompt computed and with its pages found."""
    loaded = build_loaded(family)
    prompt = random_prompt(random.Random(5), 6)
    expected = decode_ar(loaded.model, prompt, 24)
    longer = (*prompt, *expected[:10])
    engine = make_engine(loaded, page_size=4)
    for text, answer in [(prompt, expected), (prompt, expected), (longer, expected[10:])]:
        [output] = engine.generate([make_request("a", text, len(answer), window=8)])
        assert list(output.token_ids) == answer
        engine.check_integrity()
    assert engine.scheduler.num_hit_tokens == 4 + 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharing_off_computes_every_prompt(loaded: LoadedModel, answers: Answers, dtype: torch.dtype) -> None:
    plain = replace(loaded, model=build_loaded("llama", dtype).model)
    engine = make_engine(plain, page_size=2, prefix_sharing=False)
    assert engine.prefixes is None
    prompt = max(answers, key=len)
    for _ in range(2):
        before = engine.runner.num_rows
        engine.generate([make_request("a", prompt, 1)])
        assert engine.runner.num_rows - before == len(prompt)
        engine.check_integrity()
