//! Looking for the longest prefix.

use super::{BLOCK, BlockStates, PrefixCache, SegmentId, Tables, common, continuable};
use crate::cache::spec::LayerGroup;

/// What the tree has of a prompt.
#[derive(Debug)]
pub(in crate::cache) struct Found {
    /// Tokens, at least 1.
    pub(in crate::cache) len: usize,
    /// The blocks that the next query sees, and those after them.
    pub(in crate::cache) tables: Tables,
    /// The recurrent states after its blocks, as far as they are stored.
    pub(in crate::cache) states: BlockStates,
    /// The segments that they are from.
    path: Vec<SegmentId>,
}

/// What the tree has along a prompt.
#[derive(Debug)]
pub(in crate::cache) struct Along {
    /// Its segments.
    path: Vec<SegmentId>,
    /// Its blocks: a segment, and which one of it.
    blocks: Vec<(SegmentId, usize)>,
    /// What they hold, for each group; of the last one perhaps only the first tokens agree.
    pub(in crate::cache) tables: Tables,
    /// The recurrent states after them, as far as they are stored.
    pub(in crate::cache) states: BlockStates,
    /// How many tokens agree.
    pub(in crate::cache) agreeing: usize,
}

impl PrefixCache {
    /// The longest prefix of `tokens` up to `limit` from which every group can go on, within a root; with recurrent
    /// state (`stateful`) the longest after which that is stored. A block of which only the first tokens agree is found
    /// too: whoever writes to it copies it first.
    pub(in crate::cache) fn find(
        &self,
        root: u64,
        tokens: &[u32],
        limit: usize,
        groups: &[LayerGroup],
        stateful: bool,
    ) -> Option<Found> {
        let Along { path, blocks, mut tables, states, agreeing } = self.along(root, tokens, groups.len());
        let held = |group: usize, block: usize| matches!(tables[group].get(block), Some(Some(_)));
        let state = |block: usize| matches!(states.get(block), Some(Some(_)));
        let len = continuable(groups, agreeing.min(limit), &held, stateful.then_some(&state));
        if len == 0 {
            return None;
        }
        for (group, table) in groups.iter().zip(&mut tables) {
            table.truncate(len.div_ceil(BLOCK));
            table[group.policy.unseen_blocks(len)].fill(None);
        }
        let last = blocks.get(len.div_ceil(BLOCK) - 1).map(|&(segment, _)| segment);
        let depth = path.iter().position(|&id| Some(id) == last).map_or(0, |index| index + 1);
        Some(Found { len, tables, states, path: path[..depth].to_vec() })
    }

    /// What is stored along `tokens`, for `groups` layer groups.
    pub(in crate::cache) fn along(&self, root: u64, tokens: &[u32], groups: usize) -> Along {
        let (path, blocks, agreeing) = self.walk(root, tokens);
        let mut tables: Tables = vec![Vec::with_capacity(blocks.len()); groups];
        let mut states = BlockStates::new();
        for &(segment, index) in &blocks {
            states.push(self.get(segment).and_then(|s| s.states.get(index)?.clone()));
            for (group, table) in tables.iter_mut().enumerate() {
                let block = self.get(segment).and_then(|s| s.groups.get(group)?.get(index)?.clone());
                table.push(block);
            }
        }
        Along { path, blocks, tables, states, agreeing }
    }

    /// Counts a lookup, and marks what was found as used.
    pub(in crate::cache) fn touch(&mut self, found: Option<&Found>) {
        self.stats.lookups += 1;
        let Some(found) = found else { return };
        self.stats.hits += 1;
        self.stats.tokens_reused += found.len as u64;
        self.clock += 1;
        for &id in &found.path {
            if let Some(segment) = self.segments[id].as_mut() {
                segment.used = self.clock;
            }
        }
    }

    /// The segments along `tokens`, their blocks, and how many tokens agree.
    pub(super) fn walk(&self, root: u64, tokens: &[u32]) -> (Vec<SegmentId>, Vec<(SegmentId, usize)>, usize) {
        let (mut path, mut blocks, mut position) = (Vec::new(), Vec::new(), 0);
        let mut parent = None;
        loop {
            let rest = &tokens[position..];
            let agreement = |&&id: &&SegmentId| self.get(id).map_or(0, |s| common(s.block(0), rest).0);
            let Some(&child) = self.children(root, parent).iter().max_by_key(agreement) else { break };
            let Some(segment) = self.get(child).filter(|_| agreement(&&child) > 0) else { break };
            path.push(child);
            for (index, block) in segment.tokens.chunks(BLOCK).enumerate() {
                let (agreeing, _) = common(block, &tokens[position..]);
                if agreeing > 0 {
                    blocks.push((child, index));
                    position += agreeing;
                }
                if agreeing < BLOCK {
                    return (path, blocks, position);
                }
            }
            parent = Some(child);
        }
        (path, blocks, position)
    }
}
