//! Dropping segments.

use super::{PrefixCache, Segment, SegmentId, SegmentKind};
use crate::cache::block::BlockBudget;
use std::sync::Arc;

impl PrefixCache {
    /// Drops segments until `bytes` more fit into `budget`, or nothing is left to drop.
    pub(in crate::cache) fn make_room(&mut self, budget: &BlockBudget, bytes: usize) {
        // No room would be enough: what is stored need not suffer for it.
        if bytes > budget.limit() {
            return;
        }
        while budget.limit() - budget.used().min(budget.limit()) < bytes {
            // Blocks that running sequences share stay where they are. If all are shared, dropping what lies
            // on top may uncover others.
            let frees = |segment: &Segment| segment.held().any(|block| Arc::strong_count(block) == 1);
            let Some(victim) = self.victim(&frees).or_else(|| self.victim(&|_| true)) else { return };
            self.evict(victim);
        }
    }

    /// Bytes that dropping everything would free.
    pub(in crate::cache) fn evictable(&self) -> usize {
        let blocks = self.segments.iter().flatten().map(|segment| {
            let held = segment.held().filter(|block| Arc::strong_count(block) == 1);
            let states = segment.states.iter().flatten().filter(|state| Arc::strong_count(state) == 1);
            held.map(|block| block.bytes()).chain(states.map(|state| state.bytes())).sum::<usize>()
        });
        blocks.sum()
    }

    /// Drops everything.
    pub(in crate::cache) fn clear(&mut self) {
        self.segments.clear();
        self.free.clear();
        self.roots.clear();
        self.stats.kinds = Default::default();
    }

    /// Drops segments until the limits hold.
    pub(super) fn enforce(&mut self) {
        while self.stats.segments() > self.options.segments_max || self.stats.bytes() > self.options.bytes_max
        {
            let Some(victim) = self.victim(&|_| true) else { return };
            self.evict(victim);
        }
    }

    /// The segment to drop next, one without children that is `eligible`: mlx-lm's rule. The assistant's go first
    /// unless they are fewer than the user's, then the user's unless they are fewer than the system's; of a kind the
    /// one that has not been used for longest. What lies below that one goes before it.
    fn victim(&self, eligible: &dyn Fn(&Segment) -> bool) -> Option<SegmentId> {
        let oldest = |kind: SegmentKind| {
            let segments = self.segments.iter().enumerate();
            let leaves = segments.filter_map(|(id, segment)| segment.as_ref().map(|s| (id, s)));
            let leaves = leaves.filter(|(_, s)| s.children.is_empty() && eligible(s));
            let ages = leaves.filter_map(|(id, s)| Some(((self.last_use(s, kind)?, s.used), id)));
            ages.min().map(|(_, id)| id)
        };
        let count = |kind: SegmentKind| self.stats.kinds[kind as usize].segments;
        let [assistant, user, system] = SegmentKind::ALL;
        let by_rule = [(assistant, user), (user, system)].into_iter();
        let by_rule = by_rule.filter(|&(kind, next)| count(kind) >= count(next)).map(|(kind, _)| kind);
        by_rule.chain([system, user, assistant]).find_map(oldest)
    }

    /// When the nearest segment of a kind, from `segment` up to the root, was last used.
    fn last_use(&self, segment: &Segment, kind: SegmentKind) -> Option<u64> {
        let up = std::iter::successors(Some(segment), |s| s.parent.and_then(|parent| self.get(parent)));
        up.filter(|s| s.kind == kind).map(|s| s.used).next()
    }

    fn evict(&mut self, id: SegmentId) {
        self.remove(id);
        self.stats.evictions += 1;
    }

    /// Takes a segment without children out of the tree.
    pub(super) fn remove(&mut self, id: SegmentId) {
        let Some(segment) = self.segments[id].take() else { return };
        let kind = &mut self.stats.kinds[segment.kind as usize];
        kind.segments -= 1;
        kind.bytes -= segment.bytes();
        self.free.push(id);
        match segment.parent.and_then(|parent| self.segments[parent].as_mut()) {
            Some(parent) => parent.children.retain(|&child| child != id),
            None => {
                self.roots.values_mut().for_each(|children| children.retain(|&child| child != id));
                self.roots.retain(|_, children| !children.is_empty());
            }
        }
    }
}
