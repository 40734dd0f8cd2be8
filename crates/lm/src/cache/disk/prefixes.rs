//! Prefixes between the store and its folder.

use super::piece::{Chain, Part, Piece};
use super::{Data, Kept, PrefixDir, PrefixDirError, PrefixDirOptions, PrefixDirWarning};
use crate::cache::block::{BLOCK, Block, BlockBudget};
use crate::cache::prefix::{
    Along, BlockStates, Holding, PrefixCache, PrefixCacheOptions, PrefixTokens, Tables, continuable,
};
use crate::cache::sharing::QUANTIZED;
use crate::cache::spec::{KvSpec, LayerGroup, Policy};
use crate::cache::state::{State, points};
use crate::cache::store::{KvStore, SequenceId};
use lmx_tensor::kernels::attention::KvQuant;
use std::sync::Arc;

impl KvStore {
    /// Keeps prefixes in a folder too, and looks for them there. `model` stands for all that decides keys and values
    /// beside this store's own spec and the tokens. A store without a prefix cache gets one, of the default limits.
    ///
    /// # Errors
    /// [`PrefixDirError`] if the folder cannot be used.
    pub fn keep_prefixes_in(
        &mut self,
        options: PrefixDirOptions,
        model: &[&str],
    ) -> Result<(), PrefixDirError> {
        // Every field of the spec changes values or their layout, so all of it counts.
        let spec = format!("{:?}", self.spec);
        let owner: Vec<&str> = model.iter().copied().chain([spec.as_str()]).collect();
        self.prefix_dir = Some(PrefixDir::open(options, &owner)?);
        self.prefixes.get_or_insert_with(|| PrefixCache::new(PrefixCacheOptions::default()));
        Ok(())
    }

    /// What went wrong with the folder since this was last asked; no sequence suffers from it.
    pub fn take_prefix_warnings(&mut self) -> Vec<PrefixDirWarning> {
        self.prefix_dir.as_mut().map(PrefixDir::take_warnings).unwrap_or_default()
    }

    /// Brings what the folder has of a prompt into the prefix cache, where [`KvStore::add_prefix`] finds it, if a
    /// sequence could then begin with more of the first `limit` tokens than without it. Does nothing without a folder.
    pub fn load_prefix(&mut self, entry: &PrefixTokens<'_>, limit: usize) {
        let (Some(prefixes), Some(dir)) = (&self.prefixes, &mut self.prefix_dir) else { return };
        let keeps = prefixes.options().bytes_max;
        dir.passed_over.clear();
        let PrefixTokens { root, tokens, .. } = *entry;
        let before = self.stored_prefix(root, tokens, limit);
        if before == limit {
            return;
        }
        // What is stored quantized counts from where quantization starts, floats count up to there.
        let forms = match self.spec.quantization {
            None => vec![Form { root, quant: None, least: 1, limit }],
            Some(how) => vec![
                Form { root: root | QUANTIZED, quant: Some(how.quant()), least: how.start(), limit },
                Form { root, quant: None, least: 1, limit: limit.min(how.start()) },
            ],
        };
        for form in forms {
            let least = form.least.max(before + 1);
            if form.limit >= least && self.load_form(entry, &form, least, keeps) {
                break;
            }
        }
        let after = self.stored_prefix(root, tokens, limit);
        if let Some(prefixes) = self.prefixes.as_mut().filter(|_| after > before) {
            prefixes.count_dir_hit(after - before);
        }
    }

    /// Loads at least `least` tokens; false if the folder does not have them, or there is no room.
    fn load_form(&mut self, entry: &PrefixTokens<'_>, form: &Form, least: usize, keeps: usize) -> bool {
        let Self { spec, budget, prefixes: Some(prefixes), prefix_dir: Some(dir), .. } = self else {
            return false;
        };
        let entry = PrefixTokens { root: form.root, ..*entry };
        let chains = Chain::all(dir.owner, entry.root, entry.tokens);
        loop {
            let Along { tables, states, agreeing, .. } =
                prefixes.along(entry.root, entry.tokens, spec.groups.len());
            let mut search =
                Search { spec, dir, chains: &chains, quant: form.quant, tables, states, blocks: 0, tail: 0 };
            let len = search.len(&entry, agreeing, form.limit, budget);
            if len < least {
                return false;
            }
            let needed = search.lacking_bytes(len);
            if search.held_bytes(len) + needed > keeps {
                return false;
            }
            prefixes.make_room(budget, needed);
            match search.load(len, budget) {
                Loaded::All => {
                    let end = search.end(len);
                    let Search { mut tables, mut states, .. } = search;
                    tables.iter_mut().for_each(|table| table.truncate(end.div_ceil(BLOCK)));
                    states.truncate(end / BLOCK);
                    let entry = PrefixTokens { tokens: &entry.tokens[..end], ..entry };
                    prefixes.insert(&entry, Holding { tables: &tables, states: &states }, true);
                    return true;
                }
                // What was damaged or has vanished is passed over from now on.
                Loaded::Lacking => {}
                Loaded::NoRoom => return false,
            }
        }
    }

    /// Writes what a sequence, or the prefix cache, holds of a text.
    pub(in crate::cache) fn write_prefix(&mut self, id: SequenceId, entry: &PrefixTokens<'_>) {
        let Self { spec, sequences, prefixes: Some(prefixes), prefix_dir: Some(dir), .. } = self else {
            return;
        };
        let Some(sequence) = sequences.iter().find(|s| s.id == id) else { return };
        // Where a file lacked positions, blocks are not what their tokens say.
        if sequence.gaps.iter().any(|&gap| gap > 0) {
            return;
        }
        let root = entry.root | if sequence.quant.is_some() { QUANTIZED } else { 0 };
        let tokens = entry.tokens;
        // The cache may hold what windows dropped; the sequence what the cache had no room for.
        let Along { tables, states, agreeing, .. } = prefixes.along(root, tokens, spec.groups.len());
        // A block of which only the first tokens agree is another text's.
        let agrees = |block: &usize| tokens.len().min((block + 1) * BLOCK) <= agreeing;
        let own_states = sequence.states.by_block();
        let state = |block: usize| {
            let held = |states: &BlockStates| states.get(block).cloned().flatten();
            held(&own_states).or_else(|| held(&states).filter(|_| agrees(&block)))
        };
        let whole = tokens.len() / BLOCK;
        let stateful = !spec.states.is_empty();
        // Nothing goes on behind the last state.
        let ends = (0..whole).rfind(|&block| state(block).is_some()).map_or(0, |block| block + 1);
        let blocks = if stateful { ends } else { tokens.len().div_ceil(BLOCK) };
        let chains = Chain::all(dir.owner, root, tokens);
        let piece = |block: usize, part: Part| Piece {
            owner: dir.owner,
            chain: chains[(block + usize::from(!matches!(part, Part::Tail(_)))).min(whole)],
            part,
        };
        let held = |block: usize, group: usize| {
            let own = sequence.tables[group].get(block).and_then(Option::as_ref);
            own.or_else(|| tables[group].get(block).filter(|_| agrees(&block)).and_then(Option::as_ref))
        };
        let kept_states: Vec<_> = (0..blocks.min(whole)).map(state).collect();
        let mut kept = Vec::new();
        for (block, tokens) in tokens.chunks(BLOCK).take(blocks).enumerate() {
            for group in 0..spec.groups.len() {
                let part = if block < whole { Part::Block(group) } else { Part::Tail(group) };
                let data = held(block, group).map(|held| Data::Block(held.data()));
                kept.extend(data.map(|data| Kept { piece: piece(block, part), block, tokens, data }));
            }
            let data =
                kept_states.get(block).and_then(Option::as_ref).map(|state| Data::State(state.values()));
            kept.extend(data.map(|data| Kept { piece: piece(block, Part::State), block, tokens, data }));
        }
        dir.store(&kept);
    }
}

/// Floats or codes of a prompt.
struct Form {
    root: u64,
    quant: Option<KvQuant>,
    /// The least length from which a sequence goes on so, and the greatest.
    least: usize,
    limit: usize,
}

enum Loaded {
    All,
    Lacking,
    NoRoom,
}

/// A prompt that is looked for: what is held of it, and what the folder has.
struct Search<'a> {
    spec: &'a KvSpec,
    dir: &'a mut PrefixDir,
    /// One for each number of whole blocks.
    chains: &'a [Chain],
    quant: Option<KvQuant>,
    tables: Tables,
    states: BlockStates,
    /// How many whole blocks may be there.
    blocks: usize,
    /// How many tokens of the partial one behind them were read.
    tail: usize,
}

impl Search<'_> {
    fn whole(&self) -> usize {
        self.chains.len() - 1
    }

    fn piece(&self, block: usize, part: Part) -> Piece {
        let chain = self.chains[(block + usize::from(!matches!(part, Part::Tail(_)))).min(self.whole())];
        Piece { owner: self.dir.owner, chain, part }
    }

    fn held(&self, group: usize, block: usize) -> bool {
        matches!(self.tables[group].get(block), Some(Some(_)))
    }

    fn has_block(&self, group: usize, block: usize) -> bool {
        self.held(group, block) || self.dir.has(&self.piece(block, Part::Block(group)))
    }

    fn has_state(&self, block: usize) -> bool {
        matches!(self.states.get(block), Some(Some(_))) || self.dir.has(&self.piece(block, Part::State))
    }

    /// How many of the first `limit` tokens a sequence could begin with, once all is loaded. Reads a partial last block.
    fn len(
        &mut self,
        entry: &PrefixTokens<'_>,
        agreeing: usize,
        limit: usize,
        budget: &Arc<BlockBudget>,
    ) -> usize {
        let groups = &self.spec.groups;
        // A block that the cache has a part of only is one that it does not have.
        let common = agreeing / BLOCK;
        self.tables.iter_mut().for_each(|table| table.truncate(common));
        self.states.truncate(common);
        let full = |block: usize| {
            let full = groups.iter().enumerate().filter(|(_, group)| group.policy == Policy::Full);
            full.map(|(index, _)| index).all(|group| self.has_block(group, block))
        };
        // Without the blocks of full layers there is nothing to look for behind them.
        let mut blocks = (0..self.whole()).take_while(|&block| full(block)).count();
        let stateful = !self.spec.states.is_empty();
        if !stateful {
            let any = |block: &usize| (0..groups.len()).any(|group| self.has_block(group, *block));
            blocks = (0..blocks).rfind(any).map_or(0, |block| block + 1);
            self.read_tail(blocks, entry, budget);
        }
        self.blocks = blocks;
        let at = (blocks * BLOCK + self.tail).min(limit);
        let held = |group: usize, block: usize| {
            if block < blocks { self.has_block(group, block) } else { self.held(group, block) }
        };
        let state = |block: usize| self.has_state(block);
        continuable(groups, at, &held, stateful.then_some(&state))
    }

    /// Reads the partial block after `blocks` whole ones, as far as it agrees with the prompt.
    fn read_tail(&mut self, blocks: usize, entry: &PrefixTokens<'_>, budget: &Arc<BlockBudget>) {
        let rest = entry.tokens.get(blocks * BLOCK..).unwrap_or_default();
        let mut tail = if rest.is_empty() { 0 } else { BLOCK };
        let mut read = Vec::new();
        for (index, group) in self.spec.groups.iter().enumerate() {
            let piece = self.piece(blocks, Part::Tail(index));
            if tail == 0 || !self.dir.has(&piece) {
                return;
            }
            let block =
                self.dir.read(&piece, blocks, group.block_bytes(self.quant), |data| Block::of(data, budget));
            let Some((tokens, Some(block))) = block else { return };
            tail = tail.min(tokens.iter().zip(rest).take_while(|(a, b)| a == b).count());
            read.push(block);
        }
        if tail > 0 {
            self.tail = tail;
            for (table, block) in self.tables.iter_mut().zip(read) {
                table.resize(blocks, None);
                table.push(Some(Arc::new(block)));
            }
        }
    }

    /// The blocks that a sequence of `len` tokens needs of a group.
    fn needed(group: &LayerGroup, len: usize) -> impl Iterator<Item = usize> {
        let unseen = group.policy.unseen_blocks(len);
        (0..len.div_ceil(BLOCK)).filter(move |block| !unseen.contains(block))
    }

    /// The blocks after which a sequence of `len` tokens has states.
    fn needed_states(&self, len: usize) -> Vec<usize> {
        let blocks =
            points(0, len).map(|position| position / BLOCK).filter(|&block| block > 0).map(|block| block - 1);
        if self.spec.states.is_empty() {
            Vec::new()
        } else {
            blocks.filter(|&block| self.has_state(block)).collect()
        }
    }

    /// Bytes that are to be read.
    fn lacking_bytes(&self, len: usize) -> usize {
        let blocks = self.spec.groups.iter().enumerate().map(|(index, group)| {
            Self::needed(group, len).filter(|&block| !self.held(index, block)).count()
                * group.block_bytes(self.quant)
        });
        let states = self.needed_states(len).into_iter();
        let states = states.filter(|&block| !matches!(self.states.get(block), Some(Some(_))));
        blocks.sum::<usize>() + states.count() * self.state_bytes()
    }

    /// Bytes that are there.
    fn held_bytes(&self, len: usize) -> usize {
        let tables = self.tables.iter().flat_map(|table| table.iter().take(len.div_ceil(BLOCK)).flatten());
        let states = self.states.iter().take(len / BLOCK).flatten().map(|state| state.bytes());
        tables.map(|block| block.bytes()).chain(states).sum()
    }

    fn state_bytes(&self) -> usize {
        self.spec.state_floats() * size_of::<f32>()
    }

    /// Reads all that a sequence of `len` tokens needs.
    fn load(&mut self, len: usize, budget: &Arc<BlockBudget>) -> Loaded {
        for (index, group) in self.spec.groups.iter().enumerate() {
            let table = &mut self.tables[index];
            let length = table.len().max(len.div_ceil(BLOCK));
            table.resize(length, None);
            for block in Self::needed(group, len) {
                if self.held(index, block) {
                    continue;
                }
                let piece = self.piece(block, Part::Block(index));
                let take = |data: &[u8]| Block::of(data, budget);
                match self.dir.read(&piece, block, group.block_bytes(self.quant), take) {
                    Some((_, Some(read))) => self.tables[index][block] = Some(Arc::new(read)),
                    Some((_, None)) => return Loaded::NoRoom,
                    None => return Loaded::Lacking,
                }
            }
        }
        self.states.resize(self.states.len().max(len / BLOCK), None);
        for block in self.needed_states(len) {
            if self.states[block].is_some() {
                continue;
            }
            let piece = self.piece(block, Part::State);
            match self.dir.read(&piece, block, self.state_bytes(), |data| State::of(data, budget)) {
                Some((_, Some(read))) => self.states[block] = Some(Arc::new(read)),
                Some((_, None)) => return Loaded::NoRoom,
                None => return Loaded::Lacking,
            }
        }
        Loaded::All
    }

    /// Where what was loaded for `len` tokens ends: with its last block.
    fn end(&self, len: usize) -> usize {
        let blocks = len.div_ceil(BLOCK);
        if blocks <= self.blocks { blocks * BLOCK } else { self.blocks * BLOCK + self.tail }
    }
}
