//! What sequences leave behind for prompts that begin like them: a radix tree over token blocks.
//!
//! An edge of the tree is a *segment*, a run of blocks that came together and is dropped together. A segment
//! holds, for each block of tokens and each layer group, the block of keys and values, or nothing: windows drop
//! what they do not see, and what a sequence never held cannot be stored. Whether a prompt can go on from a
//! position is therefore asked for each group ([`reusable`]): all that the next query sees must be there. Models
//! with recurrent state go on after blocks only at which a snapshot of it was taken.
//!
//! The tree shares blocks with running sequences. It knows neither how they are laid out nor what is in them.

mod evict;
mod find;
#[cfg(test)]
mod tests;

use super::block::{BLOCK, Block};
use super::spec::LayerGroup;
use super::state::State;
pub(super) use find::{Along, Found};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who wrote a segment, in the order in which segments are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SegmentKind {
    /// Generated.
    Assistant,
    /// The rest of a prompt.
    User,
    /// The first part of a prompt, which many requests have in common.
    System,
}

impl SegmentKind {
    /// All kinds, in the order in which segments are dropped.
    pub const ALL: [Self; 3] = [Self::Assistant, Self::User, Self::System];
}

/// How much a prefix cache may hold. Its blocks count against the store's budget too, and give way to running
/// sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixCacheOptions {
    /// Most segments.
    pub segments_max: usize,
    /// Most bytes of keys and values, those that running sequences share included.
    pub bytes_max: usize,
    /// Whether what windows drop is kept, so that prompts may part from earlier ones anywhere. If not, they can go on
    /// from where earlier ones ended, and each text is stored with no more than a running sequence would hold.
    pub keep_unseen: bool,
}

impl Default for PrefixCacheOptions {
    /// As much as the store's budget allows.
    fn default() -> Self {
        Self { segments_max: usize::MAX, bytes_max: usize::MAX, keep_unseen: true }
    }
}

/// A sequence's tokens, and what the tree must know of them.
#[derive(Clone, Copy, Debug)]
pub struct PrefixTokens<'a> {
    /// Stands for all that changes keys and values beside the tokens; prefixes are shared within a root only. Below 2^63.
    pub root: u64,
    /// The tokens from the first position on.
    pub tokens: &'a [u32],
    /// How many of them are the system prompt.
    pub system: usize,
    /// How many of them are the prompt, the system prompt included.
    pub prompt: usize,
}

impl PrefixTokens<'_> {
    /// Who wrote the block that begins at `position`.
    fn kind(&self, position: usize) -> SegmentKind {
        match position {
            p if p < self.system => SegmentKind::System,
            p if p < self.prompt => SegmentKind::User,
            _ => SegmentKind::Assistant,
        }
    }
}

/// What a prefix cache holds of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Segments.
    pub segments: usize,
    /// Bytes of keys and values.
    pub bytes: usize,
}

/// What a prefix cache holds, and what it has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// What it holds, in the order of [`SegmentKind::ALL`].
    pub kinds: [KindStats; 3],
    /// Sequences that were looked for.
    pub lookups: u64,
    /// Those of them that found at least one token.
    pub hits: u64,
    /// The tokens that they found, in all.
    pub tokens_reused: u64,
    /// Segments that were dropped to make room.
    pub evictions: u64,
    /// Sequences for which more was found in the folder than here.
    pub dir_hits: u64,
    /// The tokens that the folder had more, in all.
    pub dir_tokens: u64,
}

impl PrefixStats {
    /// Segments of all kinds.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.kinds.iter().map(|kind| kind.segments).sum()
    }

    /// Bytes of all kinds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.kinds.iter().map(|kind| kind.bytes).sum()
    }
}

/// For each group a sequence's blocks by absolute block number; `None` where dropped.
pub(super) type Tables = Vec<Vec<Option<Arc<Block>>>>;

/// Recurrent states after whole blocks, by block number.
pub(super) type BlockStates = Vec<Option<Arc<State>>>;

/// What a sequence holds, for the tree to share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding<'a> {
    pub(super) tables: &'a Tables,
    /// May end before the tables do.
    pub(super) states: &'a BlockStates,
}

impl Holding<'_> {
    fn state(&self, block: usize) -> Option<Arc<State>> {
        self.states.get(block).cloned().flatten()
    }
}

/// Names a segment of the tree.
type SegmentId = usize;

/// Consecutive blocks that came together.
#[derive(Debug)]
struct Segment {
    kind: SegmentKind,
    /// Whole blocks of tokens; the last block of a segment without children may be partial.
    tokens: Vec<u32>,
    /// For each group, its blocks.
    groups: Tables,
    /// As many as blocks.
    states: BlockStates,
    parent: Option<SegmentId>,
    children: Vec<SegmentId>,
    /// When it was last inserted or found.
    used: u64,
}

impl Segment {
    /// The tokens of its block `index`; nothing beyond the last one.
    fn block(&self, index: usize) -> &[u32] {
        self.tokens.chunks(BLOCK).nth(index).unwrap_or_default()
    }

    fn held(&self) -> impl Iterator<Item = &Arc<Block>> {
        self.groups.iter().flatten().flatten()
    }

    fn bytes(&self) -> usize {
        let states = self.states.iter().flatten().map(|state| state.bytes());
        self.held().map(|block| block.bytes()).chain(states).sum()
    }

    /// Appends the blocks `first..end` of a sequence, whose tokens are `tokens`.
    fn extend(&mut self, tokens: &[u32], from: Holding<'_>, first: usize, end: usize) {
        self.tokens.extend_from_slice(tokens);
        for (own, table) in self.groups.iter_mut().zip(from.tables) {
            own.extend((first..end).map(|index| table.get(index).cloned().flatten()));
        }
        self.states.extend((first..end).map(|index| from.state(index)));
    }

    /// Takes blocks that it lacks at `index` from a sequence's block `of`, which has the same tokens. Returns
    /// their bytes.
    fn fill(&mut self, index: usize, from: Holding<'_>, of: usize) -> usize {
        let mut bytes = 0;
        if let (Some(slot @ None), Some(state)) = (self.states.get_mut(index), from.state(of)) {
            bytes += state.bytes();
            *slot = Some(state);
        }
        for (own, table) in self.groups.iter_mut().zip(from.tables) {
            if let (Some(slot @ None), Some(Some(block))) = (own.get_mut(index), table.get(of)) {
                bytes += block.bytes();
                *slot = Some(Arc::clone(block));
            }
        }
        bytes
    }
}

/// The tree.
#[derive(Debug)]
pub(super) struct PrefixCache {
    options: PrefixCacheOptions,
    /// By id; `None` where one was dropped.
    segments: Vec<Option<Segment>>,
    free: Vec<SegmentId>,
    /// The first segments of each root.
    roots: BTreeMap<u64, Vec<SegmentId>>,
    clock: u64,
    stats: PrefixStats,
}

impl PrefixCache {
    pub(super) fn new(options: PrefixCacheOptions) -> Self {
        Self {
            options,
            segments: Vec::new(),
            free: Vec::new(),
            roots: BTreeMap::new(),
            clock: 0,
            stats: PrefixStats::default(),
        }
    }

    pub(super) fn stats(&self) -> PrefixStats {
        self.stats
    }

    pub(super) fn options(&self) -> PrefixCacheOptions {
        self.options
    }

    /// Counts a prompt of which a folder had so many tokens more.
    pub(super) fn count_dir_hit(&mut self, tokens: usize) {
        self.stats.dir_hits += 1;
        self.stats.dir_tokens += tokens as u64;
    }

    /// Stores what is held of `entry`: the whole blocks, and with `tail` a partial last one too. What is
    /// there already stays; what is lacking is added. An entry larger than the limit is not stored.
    pub(super) fn insert(&mut self, entry: &PrefixTokens<'_>, from: Holding<'_>, tail: bool) {
        let whole = entry.tokens.len() / BLOCK * BLOCK;
        let end = if tail { entry.tokens.len() } else { whole };
        let entry = PrefixTokens { tokens: &entry.tokens[..end], ..*entry };
        let blocks = end.div_ceil(BLOCK);
        let held = from.tables.iter().flat_map(|table| table.iter().take(blocks).flatten());
        let states = from.states.iter().take(blocks).flatten().map(|state| state.bytes());
        if end == 0 || held.map(|block| block.bytes()).chain(states).sum::<usize>() > self.options.bytes_max {
            return;
        }
        self.clock += 1;
        let (mut parent, mut position) = (None, 0);
        while position < end {
            let Some(child) = self.child(entry.root, parent, &entry.tokens[position..]) else {
                (parent, position) = self.graft(&entry, from, parent, position);
                continue;
            };
            match self.descend(&entry, from, child, position) {
                Some(next) => {
                    position = next;
                    // A partial block that was the whole segment gave way to a longer one.
                    parent = if self.segments[child].is_some() { Some(child) } else { parent };
                    if position < end && self.may_grow(child, entry.kind(position)) {
                        position = self.grow(&entry, from, child, position);
                    }
                }
                None => break,
            }
        }
        self.enforce();
    }

    /// Drops the blocks along `tokens` that no query sees which goes on from their end.
    pub(super) fn drop_unseen(&mut self, root: u64, tokens: &[u32], groups: &[LayerGroup]) {
        let (_, blocks, _) = self.walk(root, tokens);
        for (number, group) in groups.iter().enumerate() {
            for &(id, index) in blocks.get(group.policy.unseen_blocks(tokens.len())).unwrap_or_default() {
                let Some(segment) = self.segments[id].as_mut() else { continue };
                if let Some(block) = segment.groups[number][index].take() {
                    self.stats.kinds[segment.kind as usize].bytes -= block.bytes();
                }
            }
        }
    }

    /// The child whose first block agrees with `tokens` as far as both go.
    fn child(&self, root: u64, parent: Option<SegmentId>, tokens: &[u32]) -> Option<SegmentId> {
        let agrees = |&&id: &&SegmentId| common(self.get(id).map_or(&[], |s| s.block(0)), tokens).1;
        self.children(root, parent).iter().find(agrees).copied()
    }

    /// Follows segment `id` along the entry from `position` on, and takes what the segment lacks. Returns the
    /// position at which the segment has ended; `None` if there is nothing more to store. Where they part in
    /// the midst of the segment it is split, and ends there.
    fn descend(
        &mut self,
        entry: &PrefixTokens<'_>,
        from: Holding<'_>,
        id: SegmentId,
        position: usize,
    ) -> Option<usize> {
        let clock = self.clock;
        let mut position = position;
        for index in 0.. {
            let segment = self.segments[id].as_mut()?;
            segment.used = clock;
            let own = segment.block(index);
            let new = &entry.tokens[position.min(entry.tokens.len())..];
            let new = &new[..new.len().min(BLOCK)];
            match common(own, new) {
                // The segment has ended.
                _ if own.is_empty() => return Some(position),
                // The entry has: what it would add is there.
                (_, true) if own.len() > new.len() => return None,
                (_, true) if own.len() == new.len() => {
                    let (bytes, kind) = (segment.fill(index, from, position / BLOCK), segment.kind);
                    self.stats.kinds[kind as usize].bytes += bytes;
                    position += new.len();
                }
                // A partial block gives way to a longer one.
                (_, true) => {
                    self.cut(id, index);
                    return Some(position);
                }
                (_, false) => {
                    self.split(id, index);
                    return Some(position);
                }
            }
        }
        None
    }

    /// Whether what comes next may join segment `id` rather than become one of its own.
    fn may_grow(&self, id: SegmentId, kind: SegmentKind) -> bool {
        self.get(id)
            .is_some_and(|s| s.children.is_empty() && s.kind == kind && s.tokens.len().is_multiple_of(BLOCK))
    }

    /// Appends the entry's blocks of one kind from `position` on to segment `id`; returns where they end.
    fn grow(&mut self, entry: &PrefixTokens<'_>, from: Holding<'_>, id: SegmentId, position: usize) -> usize {
        let kind = entry.kind(position);
        let mut end = position;
        while end < entry.tokens.len() && entry.kind(end) == kind {
            end = (end + BLOCK).min(entry.tokens.len());
        }
        if let Some(segment) = self.segments[id].as_mut() {
            let before = segment.bytes();
            let tokens = &entry.tokens[position..end];
            segment.extend(tokens, from, position / BLOCK, end.div_ceil(BLOCK));
            self.stats.kinds[kind as usize].bytes += segment.bytes() - before;
        }
        end
    }

    /// A new segment below `parent` with the entry's blocks of one kind from `position` on.
    fn graft(
        &mut self,
        entry: &PrefixTokens<'_>,
        from: Holding<'_>,
        parent: Option<SegmentId>,
        position: usize,
    ) -> (Option<SegmentId>, usize) {
        let kind = entry.kind(position);
        let groups = vec![Vec::new(); from.tables.len()];
        let children = Vec::new();
        let (tokens, states, used) = (Vec::new(), Vec::new(), self.clock);
        let segment = Segment { kind, tokens, groups, states, parent, children, used };
        let id = self.add(segment);
        self.children_mut(entry.root, parent).push(id);
        (Some(id), self.grow(entry, from, id, position))
    }

    /// Puts a segment into the table and counts it, but not its bytes.
    fn add(&mut self, segment: Segment) -> SegmentId {
        self.stats.kinds[segment.kind as usize].segments += 1;
        match self.free.pop() {
            Some(id) => {
                self.segments[id] = Some(segment);
                id
            }
            None => {
                self.segments.push(Some(segment));
                self.segments.len() - 1
            }
        }
    }

    /// Makes the blocks of segment `id` from `index` on a child of their own, with the segment's children.
    fn split(&mut self, id: SegmentId, index: usize) {
        let Some(upper) = self.segments[id].as_mut() else { return };
        let lower = Segment {
            kind: upper.kind,
            tokens: upper.tokens.split_off(index * BLOCK),
            groups: upper.groups.iter_mut().map(|blocks| blocks.split_off(index)).collect(),
            states: upper.states.split_off(index),
            parent: Some(id),
            children: std::mem::take(&mut upper.children),
            used: upper.used.saturating_sub(1),
        };
        let moved = lower.children.clone();
        let lower = self.add(lower);
        for child in moved {
            if let Some(child) = self.segments[child].as_mut() {
                child.parent = Some(lower);
            }
        }
        if let Some(upper) = self.segments[id].as_mut() {
            upper.children.push(lower);
        }
    }

    /// Drops the last block of a segment without children, which is its block `index`.
    fn cut(&mut self, id: SegmentId, index: usize) {
        let Some(segment) = self.segments[id].as_mut() else { return };
        let before = segment.bytes();
        segment.tokens.truncate(index * BLOCK);
        segment.groups.iter_mut().for_each(|blocks| blocks.truncate(index));
        segment.states.truncate(index);
        self.stats.kinds[segment.kind as usize].bytes -= before - segment.bytes();
        if index == 0 {
            self.remove(id);
        }
    }

    fn get(&self, id: SegmentId) -> Option<&Segment> {
        self.segments.get(id).and_then(Option::as_ref)
    }

    fn children(&self, root: u64, parent: Option<SegmentId>) -> &[SegmentId] {
        match parent {
            Some(id) => self.get(id).map_or(&[], |segment| &segment.children),
            None => self.roots.get(&root).map_or(&[], Vec::as_slice),
        }
    }

    fn children_mut(&mut self, root: u64, parent: Option<SegmentId>) -> &mut Vec<SegmentId> {
        match parent.and_then(|id| self.segments[id].as_mut()) {
            Some(segment) => &mut segment.children,
            None => self.roots.entry(root).or_default(),
        }
    }
}

/// How many of the first tokens agree, and whether that is one of the two as a whole.
fn common(a: &[u32], b: &[u32]) -> (usize, bool) {
    let length = a.len().min(b.len()).min(BLOCK);
    let agreeing = a.iter().zip(b).take(length).take_while(|(a, b)| a == b).count();
    (agreeing, agreeing == length)
}

/// The greatest length up to `at` from which every group can go on, given which blocks of which group are `held`; with
/// recurrent state the greatest after which that is held, given after which blocks (`state`). 0 if there is none.
pub(super) fn continuable(
    groups: &[LayerGroup],
    at: usize,
    held: &dyn Fn(usize, usize) -> bool,
    state: Option<&dyn Fn(usize) -> bool>,
) -> usize {
    let mut len = at;
    loop {
        if let Some(state) = state {
            len = (0..len / BLOCK).rfind(|&block| state(block)).map_or(0, |block| (block + 1) * BLOCK);
        }
        let each = groups.iter().enumerate().map(|(index, group)| reusable(group, &|b| held(index, b), len));
        // What suits one group may not suit another.
        match each.min().unwrap_or(len) {
            least if least == len || least == 0 => return least,
            least => len = least,
        }
    }
}

/// The largest position up to `at` from which a sequence can go on, as far as this group is concerned: every block is
/// `held` that the query there sees.
fn reusable(group: &LayerGroup, held: &dyn Fn(usize) -> bool, at: usize) -> usize {
    let unseen = group.policy.unseen_blocks(at);
    let mut seen = (0..at.div_ceil(BLOCK)).rev().filter(|index| !unseen.contains(index));
    // Every later position up to `at` sees that block too.
    seen.find(|&index| !held(index)).map_or(at, |index| index * BLOCK)
}
