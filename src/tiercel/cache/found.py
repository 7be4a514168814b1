"""What a request is going to reuse, and why not more. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.policy.resume import Reuse, Why, choose_resume
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Page, Tail
from tiercel.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Found:
    """What a request is going to reuse.

    root ── ■ ── ■ ── ■ ── □ ── □            ■ on the device, □ on the host only
                   near │       │ page       where the device's part ends, where the reused part ends
    """

    chain: KeyChain
    page: Page
    near: Page
    far: list[Page]
    tails: tuple[Tail, ...]
    branch: int
    pages_found: int
    """In any tier; without a tail not all of them help."""
    reuse: Reuse

    @property
    def pages(self) -> int:
        return self.page.depth

    @property
    def items(self) -> list[Item]:
        """Everything it depends on: what else is on the way to `near` is there when `near` is."""
        near = [self.near] if self.near.parent else []
        return [*near, *self.far, *self.tails]


def find(
    tree: PrefixTree, spec: CacheSpec, chain: KeyChain, *, load: bool, replay: bool, most: int | None = None
) -> Found:
    """The longest prefix to resume from, of `most` tokens; at least the last token is always computed."""
    whole, limit = pages_useful(chain, spec), pages_useful(chain, spec, most)
    match, page_tokens = tree.match(chain.keys, limit, device_only=not load), spec.page_tokens
    found_tokens = match.found * page_tokens
    cost = None if spec.replay_tokens is None else min(spec.replay_tokens, found_tokens)
    resume = choose_resume(
        found=match.found,
        boundary=match.boundary,
        page_tokens=page_tokens,
        replay_cost=cost if replay else None,
    )
    pages = [tree.index[key] for key in chain.keys[: resume.pages]]
    near = min(match.device, resume.pages)
    if resume.pages < match.found:
        why = Why.NO_TAIL
    elif resume.pages == limit:
        why = Why.COMPLETE if limit == whole else Why.NOT_WANTED
    else:
        why = Why.NOT_ON_DEVICE if chain.keys[resume.pages] in tree.index else Why.NOT_CACHED
    return Found(
        chain=chain,
        page=pages[-1] if pages else tree.root,
        near=pages[near - 1] if near else tree.root,
        far=pages[near:],
        tails=() if resume.by_replay else match.tails,
        branch=match.branch,
        pages_found=match.found,
        reuse=Reuse(
            prompt_tokens=chain.tokens,
            device_tokens=near * page_tokens,
            host_tokens=sum(not page.fetched for page in pages[near:]) * page_tokens,
            store_tokens=sum(page.fetched for page in pages[near:]) * page_tokens,
            found_tokens=found_tokens,
            replay_tokens=resume.replay_tokens,
            replay_cost_tokens=cost,
            why=why,
        ),
    )


def pages_useful(chain: KeyChain, spec: CacheSpec, most: int | None = None) -> int:
    """Pages that help if they are cached: at least the last token is always computed."""
    tokens = max(0, chain.tokens - 1)
    return (tokens if most is None else min(tokens, most)) // spec.page_tokens


def find_nothing(tree: PrefixTree, chain: KeyChain) -> Found:
    """For a cache that is told to miss."""
    reuse = Reuse(chain.tokens, 0, 0, 0, 0, 0, None, Why.FORCED_MISS)
    return Found(chain, tree.root, tree.root, [], (), 0, 0, reuse)
