//! What is held, for people.

use super::error::KvError;
use super::spec::{KvSpec, LayerGroup, Policy};
use super::store::{KvStore, SequenceId};
use super::{BLOCK, KvQuantization, KvWindow};
use lmx_tensor::kernels::attention::{KvQuant, KvType};
use std::fmt;

/// What a sequence holds in each group of layers; its `Display` has a line for all and one for each group.
#[derive(Clone, Debug)]
pub struct Census {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// The groups.
    pub groups: Vec<GroupCensus>,
}

/// What a sequence holds in one group of layers.
#[derive(Clone, Debug)]
pub struct GroupCensus {
    /// The layers' number, shape and policy.
    pub group: LayerGroup,
    /// Blocks of [`BLOCK`] tokens.
    pub blocks: usize,
    /// How they are quantized, if they are.
    pub quant: Option<KvQuant>,
}

impl GroupCensus {
    /// Bytes of its blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks * self.group.block_bytes(self.quant)
    }
}

impl KvSpec {
    /// What one sequence of `tokens` holds at rest.
    #[must_use]
    pub fn census(&self, tokens: usize) -> Census {
        let group = |group: &LayerGroup| {
            let blocks = tokens.div_ceil(BLOCK) - group.policy.unseen_blocks(tokens).len();
            GroupCensus { group: group.clone(), blocks, quant: self.quant_at(tokens) }
        };
        Census { tokens, groups: self.groups.iter().map(group).collect() }
    }
}

impl KvStore {
    /// What a sequence holds.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn census(&self, id: SequenceId) -> Result<Census, KvError> {
        let sequence = self.get(id)?;
        let groups = self.spec.groups.iter().zip(&sequence.tables).map(|(group, table)| GroupCensus {
            group: group.clone(),
            blocks: table.iter().flatten().count(),
            quant: sequence.quant,
        });
        Ok(Census { tokens: sequence.len, groups: groups.collect() })
    }
}

impl Census {
    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(GroupCensus::bytes).sum()
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens, {}", self.tokens, megabytes(self.bytes()))?;
        for group in &self.groups {
            write!(f, "\n{}: {} blocks, {}", group.group, group.blocks, megabytes(group.bytes()))?;
            if let Some(quant) = group.quant {
                write!(f, ", {} bits in groups of {}", quant.bits(), quant.group())?;
            }
        }
        Ok(())
    }
}

/// In mlx-lm's unit, 10⁶ bytes.
fn megabytes(bytes: usize) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

impl fmt::Display for KvSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, group) in self.groups.iter().enumerate() {
            write!(f, "{}{group}", if i > 0 { ", " } else { "" })?;
        }
        self.quantization.map_or(Ok(()), |how| write!(f, ", {how}"))
    }
}

impl fmt::Display for KvQuantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bits in groups of {} from position {} on", self.bits(), self.group(), self.start())
    }
}

impl fmt::Display for LayerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, policy, layers } = self;
        let ty = match shape.ty {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Bf16 => "bf16",
        };
        write!(f, "{layers} x {policy} ({} x {} {ty})", shape.kv_heads, shape.head_dim)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window(window) => window.fmt(f),
            Self::Chunk(size) => write!(f, "chunks of {size}"),
        }
    }
}

impl fmt::Display for KvWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.keep() {
            0 => write!(f, "window of {}", self.size()),
            keep => write!(f, "window of {} with the first {keep}", self.size()),
        }
    }
}
