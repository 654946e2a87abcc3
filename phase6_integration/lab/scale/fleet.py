# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A thousand simulated replicas and their router, in one compiled loop.

A step takes the time that the cost model of phase 2 predicts, as in phase 5's simulator. Unlike there, a request is a
row of numbers, and decodes are counted instead of visited. A cache has entries of two kinds: a shared prefix, and what
a conversation has behind it. The pages of a whole answer are taken at admission, so nothing is preempted.
`scale.routers` measures how far the two simulators are apart.

There may be several routers, and each request comes to any of them. They know the load of all replicas, but only the
texts that they sent themselves. Of a conversation, they look at the replica that it was last sent to.
"""

from typing import NamedTuple

import numpy as np

from phase2_prefill_decode.extras.cpu.intrinsics import compiled, kernel
from phase6_integration.lab.scale.traces import LONGEST_ANSWER, NONE, row

PAGE, CHUNK, BUDGET, MOST_RUNNING = 16, 512, 1024, 256
ROUTERS = ("random", "round robin", "least loaded", "approximate tree", "digests")
RANDOM, ROUND_ROBIN, LEAST_LOADED, APPROXIMATE, DIGESTS = range(5)
# The defaults of a router with an approximate tree (smg, formerly SGLang's): the differences of load beyond which
# prefixes do not count, and the share of a prompt that must match.
UNEVEN, UNEVEN_RATIO, MATCHED = 64, 1.5, 0.3
WEIGHT, SLACK, IMBALANCE = 0.5, 4, 0.5  # of RoutingPolicy
LINGER = 2  # reports after the end of a request, during which its pages are expected
WAITING, PREFILLING = range(2)
# NONE is also the end of a list, and a free entry.

REPLICA = row(i8="free running decoding context steps entries vacant")  # context: the keys that its decodes read
ENTRY = row(i4="tokens seen locks")  # seen: in the last report
# Of the last request of a conversation, and how long that is expected to be cached.
CONVERSATION = row(i4="replica entry sent said router", f8="until")
PREFIX = row(i4="entry seen sent", f8="until")  # the same of a prefix on one replica


class Fleet(NamedTuple):
    requests: np.ndarray
    replicas: np.ndarray
    entries: np.ndarray  # [replica, entry]
    names: np.ndarray  # [replica, entry]: a conversation, or -2 - prefix
    used: np.ndarray  # [replica, entry]: when; infinite if it is locked or empty
    conversations: np.ndarray
    prefixes: np.ndarray  # [prefix, replica]
    shared: int  # tokens of a prefix
    load: np.ndarray  # requests that a replica was sent and has not finished
    ends: np.ndarray  # when its step ends
    turn: np.ndarray  # a tournament of these: 1 is the replica whose step ends next
    queues: np.ndarray  # [waiting or prefilling, first or last, replica]
    ending: np.ndarray  # [replica, step]: requests whose answer ends with that step
    parts: np.ndarray  # of step times: [a token is drawn, part, of arithmetic or memory, term]
    sums: np.ndarray  # tokens generated; samples of the highest load over the average, and their sum


def fleet(requests: np.ndarray, replicas: int, pages: int, shared: int, prefixes: int, parts: np.ndarray) -> Fleet:
    """So many idle replicas, for a trace."""
    size, slots = 1 << max(replicas - 1, 1).bit_length(), pages // 4
    turn = np.arange(-size, size)  # the second half are the replicas themselves
    for at in range(size - 1, 0, -1):
        turn[at] = turn[2 * at]
    state, talks = np.zeros(replicas, REPLICA), np.zeros(requests["conversation"].max() + 1, CONVERSATION)
    state["free"], talks["replica"], talks["sent"], talks["router"] = pages, NONE, NONE, NONE
    return Fleet(
        requests, state, np.zeros((replicas, slots), ENTRY), np.full((replicas, slots), NONE, np.int32),
        np.full((replicas, slots), np.inf), talks, np.zeros((max(prefixes, 1), replicas), PREFIX), shared,
        np.zeros(replicas, np.int64), np.full(size, np.inf), turn, np.full((2, 2, replicas), NONE),
        np.full((replicas, LONGEST_ANSWER + 1), NONE, np.int32), parts, np.zeros(3),
    )  # fmt: skip


# The cache


@compiled()
def find(f, r, name):
    """The entry of this name, or -1. The index of a conversation has only the newest of its entries."""
    if name < NONE:
        e = f.prefixes[-2 - name, r].entry
        return e if f.names[r, e] == name else NONE
    conversation = f.conversations[name]
    if conversation.replica == r or conversation.replica == NONE:
        return conversation.entry if f.names[r, conversation.entry] == name else NONE
    for e in range(f.replicas[r].entries):
        if f.names[r, e] == name:
            return e
    return NONE


@compiled()
def hold(f, r, name):
    """Lock the entry of this name, a new one if there is none."""
    e, replica = find(f, r, name), f.replicas[r]
    if e == NONE:
        e = replica.vacant
        while e < replica.entries and f.names[r, e] != NONE:
            e += 1
        replica.vacant, replica.entries = e + 1, max(replica.entries, e + 1)
        f.names[r, e], f.entries[r, e].tokens, f.entries[r, e].seen = name, 0, 0
    if name < NONE:
        f.prefixes[-2 - name, r].entry = e
    else:
        f.conversations[name].replica, f.conversations[name].entry = r, e
    f.entries[r, e].locks += 1
    f.used[r, e] = np.inf
    return e


@compiled()
def release(f, r, e, now):
    f.entries[r, e].locks -= 1
    if f.entries[r, e].locks == 0 and f.entries[r, e].tokens:
        f.used[r, e] = now


@compiled()
def evict(f, r, count):
    """Free pages until this many are free: the least recently used entry first, from its end."""
    replica = f.replicas[r]
    while replica.free < count:
        oldest = 0
        for e in range(1, replica.entries):
            if f.used[r, e] < f.used[r, oldest]:
                oldest = e
        if f.used[r, oldest] == np.inf:
            return
        entry = f.entries[r, oldest]
        pages = min(entry.tokens // PAGE, count - replica.free)
        replica.free += pages
        entry.tokens -= pages * PAGE
        if entry.tokens == 0:
            f.used[r, oldest] = np.inf


@compiled()
def report(f, r):
    """Tell the router what the cache has. An entry that is empty is free."""
    for e in range(f.replicas[r].entries - 1, -1, -1):
        entry, name = f.entries[r, e], f.names[r, e]
        entry.seen = entry.tokens
        if name < NONE:
            f.prefixes[-2 - name, r].seen = entry.tokens
        if entry.tokens == 0 and entry.locks == 0:
            f.names[r, e] = NONE
        if f.names[r, e] == NONE:
            f.replicas[r].vacant = e


# A replica


@compiled()
def set_end(f, r, time):
    f.ends[r], at = time, (len(f.turn) // 2 + r) // 2
    while at:
        left, right = f.turn[2 * at], f.turn[2 * at + 1]
        f.turn[at] = left if f.ends[left] <= f.ends[right] else right
        at //= 2


@compiled()
def push(f, which, r, i):
    first, last = f.queues[which, 0], f.queues[which, 1]
    if first[r] == NONE:
        first[r] = i
    else:
        f.requests[last[r]].next = i
    last[r], f.requests[i].next = i, NONE


@compiled()
def admit(f, r, now):
    """The next request that waits, if it may run and gets its pages; or -1."""
    i, replica = f.queues[WAITING, 0, r], f.replicas[r]
    if i == NONE or replica.running == MOST_RUNNING:
        return NONE
    q = f.requests[i]
    e, prefix, shared, missing = hold(f, r, q.conversation), NONE, 0, 0
    if q.prefix != NONE:
        prefix, shared = hold(f, r, -2 - q.prefix), f.shared
        missing = shared - f.entries[r, prefix].tokens
    known = f.entries[r, e].tokens
    own = (q.prompt + q.answer + PAGE - 1) // PAGE - (shared + known) // PAGE
    evict(f, r, own + missing // PAGE)
    if replica.free < own + missing // PAGE:
        release(f, r, e, now)
        if shared:
            release(f, r, prefix, now)
        return NONE
    q.hit = min(shared - missing + (0 if missing else known), (q.prompt - 1) // PAGE * PAGE)
    q.left, q.entry, q.pages = q.prompt - q.hit, e, own
    replica.free -= own + missing // PAGE
    replica.running += 1
    if shared:
        f.entries[r, prefix].tokens = shared
    f.queues[WAITING, 0, r] = q.next
    push(f, PREFILLING, r, i)
    return i


@compiled()
def plan(f, r, now):
    """Begin a step: all decodes, then prompts in order, then new ones, under one budget."""
    replica = f.replicas[r]
    tokens, pairs, keys, yields = replica.decoding, replica.context, replica.context, replica.decoding
    i = f.queues[PREFILLING, 0, r]
    while True:
        if i == NONE:
            i = admit(f, r, now) if tokens < BUDGET else NONE
            if i == NONE:
                break
        q = f.requests[i]
        size, start = min(CHUNK, q.left, BUDGET - tokens), q.prompt - q.left
        q.chunk, tokens, yields = size, tokens + size, yields + (size == q.left)
        if size:
            pairs, keys = pairs + size * (2 * start + size + 1) // 2, keys + start + size
        i = q.next
    seconds = 0.0 if tokens else np.inf
    for part in range(f.parts.shape[1]):
        slowest = 0.0
        for side in range(2):
            s = f.parts[1 if yields else 0, part, side]
            slowest = max(slowest, s[0] + s[1] * tokens + s[2] * pairs + s[3] * keys + s[4] * yields)
        seconds += slowest
    set_end(f, r, now + seconds)


@compiled()
def end_step(f, r, period):
    """Give each decode its token and each prompt its chunk, end what is complete, and begin the next step."""
    now, replica = f.ends[r], f.replicas[r]
    replica.steps += 1
    replica.context += replica.decoding
    f.sums[0] += replica.decoding
    at = replica.steps % f.ending.shape[1]
    i, f.ending[r, at] = f.ending[r, at], NONE
    while i != NONE:
        q = f.requests[i]
        i = q.next
        replica.decoding -= 1
        replica.context -= q.prompt + q.answer
        end(f, r, q, now, period)
    i, f.queues[PREFILLING, 0, r] = f.queues[PREFILLING, 0, r], NONE
    while i != NONE:
        this, q = i, f.requests[i]
        i, q.left = q.next, q.left - q.chunk
        if q.left:
            push(f, PREFILLING, r, this)
            continue
        q.ttft = now - q.time
        f.sums[0] += 1
        if q.answer == 1:
            end(f, r, q, now, period)
        else:
            replica.decoding += 1
            replica.context += q.prompt + 1
            at = (replica.steps + q.answer - 1) % f.ending.shape[1]
            q.next, f.ending[r, at] = f.ending[r, at], this
    if period == 0:
        report(f, r)
    plan(f, r, now)


@compiled()
def end(f, r, q, now, period):
    """Leave what was computed in the cache, and free the other pages."""
    f.load[r] -= 1
    f.replicas[r].running -= 1
    q.tpot = (now - q.time - q.ttft) / max(q.answer - 1, 1)
    shared, known = f.shared if q.prefix != NONE else 0, f.entries[r, q.entry].tokens
    tokens = max((q.prompt + q.answer - 1) // PAGE * PAGE - shared, known)
    f.replicas[r].free += q.pages - (tokens - known) // PAGE
    f.entries[r, q.entry].tokens = tokens
    release(f, r, q.entry, now)
    f.conversations[q.conversation].until = now + LINGER * period
    if shared:
        e = find(f, r, -2 - q.prefix)
        release(f, r, e, np.nextafter(now, np.inf))  # after the conversations behind it
        if f.entries[r, e].locks == 0:
            f.prefixes[q.prefix, r].until = now + LINGER * period


# Routers


@compiled()
def less_loaded(f, one, other):
    return other if f.load[other] < f.load[one] else one


@compiled()
def least_loaded(f):
    """Of equals, the first from a random place on."""
    best = start = np.random.randint(len(f.load))
    for k in range(start + 1, start + len(f.load)):
        best = less_loaded(f, best, k % len(f.load))
    return best


@compiled()
def choose(f, way, i, router, hits):
    """The replica of a request, and the tokens that its router expects there."""
    if way == RANDOM:
        return np.random.randint(len(f.load)), 0
    if way == ROUND_ROBIN:
        return i % len(f.load), 0
    if way == LEAST_LOADED:
        return least_loaded(f), 0
    q = f.requests[i]
    if way == APPROXIMATE:
        return guess(f, q, router)
    conversation, shared = f.conversations[q.conversation], f.shared if q.prefix != NONE else 0
    for r in range(len(hits)):
        hits[r] = 0
        if shared:
            prefix = f.prefixes[q.prefix, r]
            hits[r] = shared if prefix.until > q.time else prefix.seen
    r = conversation.sent
    if conversation.router == router and conversation.until > q.time:
        hits[r] = max(hits[r], conversation.said)
    elif r != NONE and hits[r] == shared:
        e = find(f, r, q.conversation)
        hits[r] += f.entries[r, e].seen if e != NONE else 0
    r = first_of_rank(f.load, hits, q.prompt, WEIGHT, SLACK, IMBALANCE)
    return r, min(hits[r], q.prompt - 1)


@kernel
def first_of_rank(loads, hits, whole, weight, slack, imbalance):
    """The first replica of `phase6_integration.cluster.routing.rank`."""
    n, least, average = len(loads), loads.min(), loads.mean()
    best, lowest, start = 0, np.inf, np.random.randint(n)
    if hits.max() == 0:
        other = (start + np.random.randint(1, max(n, 2))) % n
        return other if loads[other] < loads[start] else start
    bound = least + max(slack, imbalance * average)
    for k in range(start, start + n):
        r = k - n if k >= n else k
        cost = 1 - hits[r] / whole + weight * (loads[r] - least) / max(1.0, average)
        if loads[r] <= bound and cost < lowest:
            best, lowest = r, cost
    return best


@compiled()
def guess(f, q, router):
    """Choose by a tree of the texts that were sent to each replica. It never sees an eviction."""
    most, fewest, conversation = f.load.max(), f.load.min(), f.conversations[q.conversation]
    if most - fewest > UNEVEN and most > UNEVEN_RATIO * fewest:
        return least_loaded(f), 0
    if conversation.router == router and conversation.said >= MATCHED * q.prompt:
        return conversation.sent, min(conversation.said, q.prompt - 1)
    best, start = NONE, np.random.randint(len(f.load))
    if q.prefix != NONE and f.shared >= MATCHED * q.prompt:
        for k in range(start, start + len(f.load)):
            r = k % len(f.load)
            if f.prefixes[q.prefix, r].sent:
                best = r if best == NONE else less_loaded(f, best, r)
    return (best, f.shared) if best != NONE else (least_loaded(f), 0)


@kernel
def serve(f, way, routers, period, seed, warm):
    """Run a trace, and return the tokens generated from request `warm` to the last arrival. Every `period` seconds a
    replica reports its cache; with 0, after each step."""
    np.random.seed(seed)
    n, reports, hits = len(f.load), 0, np.zeros(len(f.load), np.int64)
    for i in range(len(f.requests)):
        q = f.requests[i]
        while f.ends[f.turn[1]] <= q.time:
            end_step(f, f.turn[1], period)
        while period and reports * period / n <= q.time:
            report(f, reports % n)
            reports += 1
        if i == warm:
            f.sums[:] = 0
        router = np.random.randint(routers)
        r, q.expected = choose(f, way, i, router, hits)
        conversation = f.conversations[q.conversation]
        conversation.sent, conversation.said, conversation.router = r, q.prompt, router
        conversation.until = np.inf
        if q.prefix != NONE:
            f.prefixes[q.prefix, r].sent, f.prefixes[q.prefix, r].until = 1, np.inf
        f.load[r] += 1
        push(f, WAITING, r, i)
        if f.ends[r] == np.inf:
            plan(f, r, q.time)
        if i % n == 0:
            f.sums[1] += 1
            f.sums[2] += f.load.max() / max(f.load.mean(), 1)
    generated = f.sums[0]
    while f.ends[f.turn[1]] < np.inf:
        r = f.turn[1]
        end_step(f, r, period)
        report(f, r)  # which frees empty entries
    return generated
