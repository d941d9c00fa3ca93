"""Samples of one prompt share its blocks: one computes them, the others wait for it; nobody waits in vain."""

from epmoe.config import EngineConfig
from epmoe.engine.kv_cache import BlockPool
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.scheduler import Scheduler

BLOCK = 8


def run(prompts, params, reuse=True, budget=64, late=1):
    """Schedule samples ``(prompt, index)`` to their end with draws read ``late`` steps after; chunks by step."""
    engine = EngineConfig(model="m", max_batch_tokens=budget, max_requests=8, max_model_len=64, block_size=BLOCK)
    pool = BlockPool(64, BLOCK, reuse)
    scheduler = Scheduler(engine, pool, ())
    for number, (prompt, index) in enumerate(prompts):
        scheduler.add(Request(number, prompt, params, 0, index))
    steps, under_way = [], []
    while scheduler.has_work:
        under_way.append(scheduler.schedule())
        steps.append([(chunk.request.id, chunk.count) for chunk in under_way[-1]])
        if len(under_way) > late:
            chunks = under_way.pop(0)
            scheduler.commit(chunks, [9 for chunk in chunks if chunk.samples])
        assert len(steps) < 200, "a request never ends"
    assert pool.num_free == pool.num_blocks
    return steps


def test_one_computes_the_prompt():
    prompt = list(range(30))  # three full blocks and 6 tokens
    steps = run([(prompt, index) for index in range(4)], SamplingParams(n=4, max_tokens=3))
    assert steps[0] == [(0, 30)]
    first = {number: count for step in reversed(steps) for number, count in step}
    assert first == {0: 30, 1: 6, 2: 6, 3: 6}
    assert next(n for n, step in enumerate(steps) if (1, 6) in step) <= 2


def test_prompts_in_chunks():
    steps = run([(list(range(30)), index) for index in range(3)], SamplingParams(n=3, max_tokens=2), budget=12)
    total = sum(count for step in steps for _, count in step)
    assert total == 30 + 2 * 6 + 3  # one more token of each is run, the last is not


def test_nothing_to_wait_for():
    params = SamplingParams(n=2, max_tokens=2)
    short = run([([1, 2, 3], 0), ([1, 2, 3], 1)], params)
    assert short[0] == [(0, 3), (1, 3)]
    others = run([(list(range(20)), 0), (list(range(1, 21)), 1)], params)
    assert others[0] == [(0, 20), (1, 20)]
    without = run([(list(range(20)), 0), (list(range(20)), 1)], params, reuse=False)
    assert without[0] == [(0, 20), (1, 20)]
    apart = run([(list(range(20)), 0), (list(range(20)), 0)], params)  # two requests, not samples of one
    assert apart[0] == [(0, 20), (1, 20)]


def test_prompt_of_whole_blocks():
    """The last block is computed by each: a request needs the logits of its last token."""
    steps = run([(list(range(24)), index) for index in range(2)], SamplingParams(n=2, max_tokens=2), late=0)
    assert steps[:2] == [[(0, 24)], [(0, 1), (1, 8)]]
