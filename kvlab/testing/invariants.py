"""What must hold of an engine between two steps, counted anew from its tables: a test calls `check_invariants` after each operation."""

from __future__ import annotations

from collections import Counter

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import BlockPool
from kvlab.cache.radix import Node
from kvlab.engine.engine import Engine
from kvlab.engine.sequence import RUNNING, SWAPPED, WAITING, Sequence
from kvlab.types import UserError


def check_invariants(engine: Engine) -> None:
    """Every invariant of pools, tables, queues and sequences.

    Raises:
        AssertionError: the first that does not hold; its message names block, sequence or request. UserError: under python -O.
    """
    if not __debug__:
        raise UserError("Python was started with -O (PYTHONOPTIMIZE), which drops the checks of kvlab.testing. Run this without it.")
    _check_queues(engine)
    held, held_cpu = _held(engine)
    held += engine.kv.parking.held(engine.kv.pool)
    held_cpu += engine.kv.parking.held(engine.kv.cpu_pool)
    _check_pool(engine.kv.pool, held, set(engine.kv.regions.kept_blocks()) if engine.kv.regions is not None else set())
    _check_pool(engine.kv.cpu_pool, held_cpu, set())
    _check_slots(engine)
    for group in engine.groups.values():
        for seq in group.seqs:
            _check_sequence(engine.kv, seq)
    _check_prefixes(engine.kv)


def check_drained(engine: Engine) -> None:
    """Nothing is left of the requests: no block is held in any tier, no sequence is known (the next plan releases the last ones)."""
    check_invariants(engine)
    assert not engine.groups, f"{len(engine.groups)} requests are unfinished"
    assert not engine.sequences, f"sequences {sorted(engine.sequences)} live without a request"
    kv = engine.kv
    for pool in (kv.pool, kv.cpu_pool):
        assert pool.num_held == 0, f"{pool.num_held} blocks of tier {pool.tier} are held by nobody's table"
    assert not kv.pending_copies, f"copies {kv.pending_copies} of nobody"
    assert kv.regions is None or not kv.regions.spare, "regions are kept for nobody's forks"
    assert not len(kv.parking), "blocks are parked though no step is in flight"
    assert not engine.scheduler.forked, "the runner is to start sequences that have ended"


def _check_queues(engine: Engine) -> None:
    scheduler = engine.scheduler
    waiting, running, swapped = list(scheduler.waiting), scheduler.running, scheduler.swapped
    everyone = [*waiting, *running, *swapped]
    twice = [name for name, count in Counter(g.request_id for g in everyone).items() if count > 1]
    assert not twice, f"requests {twice} stand in more than one place of the queues"
    assert {g.request_id for g in everyone} == set(engine.groups), "the queues and the engine's requests differ"
    for queue, status in ((waiting, WAITING), (running, RUNNING), (swapped, SWAPPED)):
        for group in queue:
            assert group.status == status, f"request {group.request_id} is in queue {status} with status {group.status}"
            assert group.seqs, f"request {group.request_id} has no live sequence and has not ended"
    live = {s.seq_id: s for g in everyone for s in g.seqs}
    assert live.keys() == engine.sequences.keys(), f"sequences {sorted(engine.sequences)} are kept, {sorted(live)} live"
    assert all(engine.sequences[seq_id] is seq for seq_id, seq in live.items()), "a number stands for two sequences"
    assert len(running) == len({g.admission_order for g in running}), "two requests were admitted as the same"
    for seq in scheduler.forked:
        assert live.get(seq.seq_id) is seq, f"the runner is to start sequence {seq.seq_id}, which does not live"
        assert seq.table is not None, f"the runner is to start sequence {seq.seq_id}, which holds nothing"


def _held(engine: Engine) -> tuple[Counter[int], Counter[int]]:
    """Block -> number of holders, of both tiers. A swapped group holds each of its cpu blocks once."""
    gpu: Counter[int] = Counter()
    cpu: Counter[int] = Counter()
    for group in engine.groups.values():
        tables = [seq.table for seq in group.seqs if seq.table is not None]
        if group.status == RUNNING:
            gpu.update(b for table in tables for b in table.block_ids)
            gpu.update(b for region in engine.kv.spare_regions(group) for b in region)
        elif group.status == SWAPPED:
            cpu.update({b for table in tables for b in table.block_ids})
        else:
            assert not tables, f"request {group.request_id} waits and holds blocks"
        if group.status != RUNNING:
            assert not engine.kv.spare_regions(group), f"request {group.request_id} keeps regions while {group.status}"
        distinct = len({b for table in tables for b in table.block_ids}) if group.status == RUNNING else 0
        assert group.num_blocks == distinct, f"request {group.request_id} says {group.num_blocks} blocks, its tables hold {distinct}"
    return gpu, cpu


def _check_pool(pool: BlockPool, held: Counter[int], kept: set[int]) -> None:
    name = f"tier {pool.tier}"
    assert len(pool.blocks) == pool.num_blocks
    free = [b.block_id for b in pool.blocks if b.block_id in pool.free]
    pinned = [b.block_id for b in pool.blocks if b.content and b.ref_count == 0 and pool.eviction and pool.eviction.is_pinned(b.block_id)]
    assert len(pinned) == pool.num_pinned, f"{name}: {len(pinned)} blocks are pinned, {pool.num_pinned} counted"
    evictable = [b.block_id for b in pool.blocks if (b.content or b.block_id in kept) and b.ref_count == 0
                 and b.block_id not in pinned]  # fmt: skip
    used = [b.block_id for b in pool.blocks if b.ref_count > 0] + pinned
    assert len(free) == pool.num_free, f"{name}: {len(free)} blocks are marked free, {pool.num_free} counted"
    assert len(evictable) == pool.num_evictable, f"{name}: {len(evictable)} blocks are evictable, {pool.num_evictable} counted"
    assert len(used) == pool.num_used, f"{name}: {len(used)} blocks are used, {pool.num_used} counted"
    assert sorted(free + evictable + used) == list(range(pool.num_blocks)), f"{name}: free, evictable and used overlap or leave some out"
    assert pool.free.lowest(pool.num_blocks) == free, f"{name}: the free list is {pool.free.lowest(pool.num_blocks)}, free are {free}"
    for block in pool.blocks:
        wanted = held[block.block_id]
        assert block.ref_count == wanted, f"{name}: block {block.block_id} counts {block.ref_count} holders, {wanted} hold it"
        assert block.block_id not in pool.free or not block.content, f"{name}: free block {block.block_id} is published"
    published = {b.content: b for b in pool.blocks if b.content}
    assert len(published) == sum(1 for b in pool.blocks if b.content), f"{name}: two blocks are published as one content"
    assert published.keys() == pool.by_content.keys(), f"{name}: the content map and the published blocks differ"
    assert all(pool.by_content[content] is block for content, block in published.items()), f"{name}: the content map points elsewhere"


def _check_prefixes(kv: KVCacheManager) -> None:
    """The indices of cached tokens hold what is cached; a tree's blocks hang where their names say."""
    cached, shareable, tree = kv.pool.by_content, kv.prefixes.shareable, kv.prefixes.tree
    if shareable is not None:
        assert set(shareable._of) == set(cached), "index of shareable tokens and cached blocks differ"
    if tree is None:
        return
    todo: list[tuple[Node, bytes, bytes | None]] = [(child, name, None) for name, root in tree.roots.items()
                                                    for child in root.children.values()]  # fmt: skip
    num_found = 0
    while todo:
        node, key, parent = todo.pop()
        assert node.block_ids, "a node without blocks lives on"
        for i, block_id in enumerate(node.block_ids):
            key = kv.prefix_cache.key(key, node.tokens[i * kv.block_size : (i + 1) * kv.block_size])
            block = kv.pool.blocks[block_id]
            assert block.content == key, f"block {block_id} has another content than its place in the tree"
            assert block.parent == parent, f"block {block_id} has another parent than in the tree"
            parent = key
        num_found += len(node.block_ids)
        todo += [(child, key, parent) for child in node.children.values()]
    is_whole = kv.compression.attention_window is None
    assert num_found == len(tree), "the tree counts other blocks than hang in it"
    assert num_found == len(cached) or not is_whole, f"{num_found} blocks can be found, {len(cached)} are cached"


def _check_slots(engine: Engine) -> None:
    """Every sequence with a region, and every region set aside, has a slot of its own; the others keep what they say."""
    regions = engine.kv.regions
    if regions is None or regions.slots is None:
        return
    slots, size = regions.slots, engine.kv.block_size
    held = {seq.seq_id for group in engine.scheduler.running for seq in group.seqs if seq.table is not None}
    held |= set(engine.kv.parking.ghosts)
    assert set(slots._of_seq) == held, f"sequences {sorted(held)} have regions, {sorted(slots._of_seq)} have slots"
    spare = {group_id: len(found) for group_id, found in regions.spare.items() if found}
    assert {group_id: len(found) for group_id, found in slots._spare.items() if found} == spare, "regions and slots set aside differ"
    assert len(held) + sum(spare.values()) + slots.num_idle == slots.layout.num_slots, "a slot is lost"
    for slot in slots.idle():
        assert len(slot.block_ids) == -(-len(slot.token_ids) // size), f"slot {slot.slot_id} keeps {slot.block_ids} for its tokens"
    kept = slots.kept_blocks()
    assert len(kept) == len(set(kept)), f"a block is kept twice: {kept}"


def _check_sequence(kv: KVCacheManager, seq: Sequence) -> None:
    table, name, size = seq.table, f"sequence {seq.seq_id} of {seq.group.request_id}", kv.block_size
    if table is None:
        assert seq.num_computed == 0, f"{name} holds nothing and counts {seq.num_computed} computed tokens"
        return
    ids, dropped = table.block_ids, table.num_dropped_blocks
    assert seq.attach_to is None, f"{name} holds blocks and still has to branch off"
    goes_on = seq.num_computed < len(seq.tokens) or seq.flight >= 0
    assert goes_on, f"{name}: {seq.num_computed} of {len(seq.tokens)} tokens computed, none is left to run"
    assert table.capacity == (dropped + len(ids)) * size, f"{name}: capacity {table.capacity}, blocks {ids} after {dropped} dropped"
    if dropped:
        head = -(-kv.compression.num_sink_tokens // size)
        assert table.num_head_blocks == head, f"{name}: {table.num_head_blocks} blocks stay at the head, sinks fill {head}"
    least = (table.num_head_blocks + dropped) * size if dropped else 0
    assert table.capacity >= seq.num_computed >= least, f"{name}: {seq.num_computed} tokens computed, blocks {ids} after {dropped}"
    assert len(ids) == len(set(ids)), f"{name} holds a block twice: {ids}"
    if seq.group.status == SWAPPED:
        assert len(ids) == kv.num_blocks_for(seq.num_computed) - dropped, f"{name}: {ids} in swap for {seq.num_computed} tokens"
        return
    if kv.layout.is_contiguous:
        assert ids == list(range(ids[0], ids[0] + len(ids))), f"{name}: its region {ids} is not consecutive"
    elif kv.layout.shares_blocks:  # a region may have been larger before
        assert len(ids) == kv.num_blocks_for(seq.num_computed) - dropped, f"{name} holds {ids} for {seq.num_computed} tokens"
    _check_contents(kv, seq, name)


def _check_contents(kv: KVCacheManager, seq: Sequence, name: str) -> None:
    """Published blocks hold this sequence's own tokens; the one written next is its own, or marked to be copied first."""
    table, size = seq.table, kv.block_size
    assert table is not None
    if kv.prefix_cache.enabled:
        assert table.num_full <= seq.num_computed // size, f"{name}: {table.num_full} blocks offered, {seq.num_computed // size} full"
        key = kv.prefix_cache.root(seq.group.request.cache_salt)
        for i in range(table.num_full):
            parent, key = key, kv.prefix_cache.key(key, seq.tokens[i * size : (i + 1) * size])
            at = table.index(i)
            if at < 0:
                assert table.num_head_blocks <= i < table.num_head_blocks + table.num_dropped_blocks, f"{name}: block {i} is lost"
                continue
            block = kv.pool.blocks[table.block_ids[at]]
            assert not block.content or block.content == key, f"{name}: block {block.block_id} is published with other content"
            assert key in kv.pool.by_content or not block.content, f"{name}: block {block.block_id} has lost its content"
            if block.content:
                assert (block.parent, block.depth) == (parent if i else None, i), f"{name}: block {block.block_id} has another parent"
    for i in range(seq.num_computed // size, table.num_dropped_blocks + len(table.block_ids)):
        if table.index(i) >= 0:
            block_id = table.block_ids[table.index(i)]
            block = kv.pool.blocks[block_id]
            is_own = block.ref_count == 1 and not block.content
            assert is_own or table.tail_shared, f"{name} will write block {block_id}, which is published or shared, without a copy"
            work = [(seq, seq.num_computed + 1)]
            assert is_own or kv.num_to_grow(work) >= 1, f"{name} will write block {block_id}, and no block is counted for its copy"
