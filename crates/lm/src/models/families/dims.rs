//! The keys that every family has.

use crate::models::config::{Config, ConfigError};

/// The largest number of layers; the deepest known models have a few hundred.
pub(crate) const LAYERS_MAX: usize = 4096;
/// The largest product of heads and head width, and the largest width of anything: models have up to 2^18.
const WIDTH_MAX: usize = 1 << 24;

/// The sizes of a decoder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) intermediate: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    /// `max_position_embeddings`.
    pub(super) positions: usize,
    /// `rms_norm_eps`, or what the family calls it.
    pub(super) eps: f32,
}

/// What a family has where a key is absent; `None` makes the key required, but kv_heads become heads and head_dim
/// hidden / heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    pub(super) heads: Option<usize>,
    pub(super) kv_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) vocab: Option<usize>,
    pub(super) positions: usize,
    pub(super) eps: f64,
}

impl Dims {
    /// Reads and checks the sizes.
    pub(super) fn read(config: &Config, defaults: &Defaults) -> Result<Self, ConfigError> {
        let intermediate = config.size("intermediate_size")?;
        check_width(config, "intermediate_size", intermediate)?;
        Self::with(config, defaults, intermediate, "rms_norm_eps")
    }

    /// [`Dims::read`] for a family that has its own keys for the width of the MLP and the norms' epsilon.
    pub(super) fn with(
        config: &Config,
        defaults: &Defaults,
        intermediate: usize,
        eps_key: &str,
    ) -> Result<Self, ConfigError> {
        let or_required = |key: &str, default: Option<usize>| match default {
            Some(default) => config.size_or(key, default),
            None => config.size(key),
        };
        let hidden = config.size("hidden_size")?;
        let heads = or_required("num_attention_heads", defaults.heads)?;
        let kv_heads = config.size_or("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?;
        let head_dim = match config.size_opt("head_dim")?.or(defaults.head_dim) {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(
                    config.invalid("hidden_size", &format!("a multiple of num_attention_heads, {heads}"))
                );
            }
        };
        let dims = Self {
            hidden,
            layers: config.size("num_hidden_layers")?,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocab: or_required("vocab_size", defaults.vocab)?,
            positions: config.size_or("max_position_embeddings", defaults.positions)?,
            eps: config.positive_or(eps_key, defaults.eps)? as f32,
        };
        dims.check(config)?;
        Ok(dims)
    }

    fn check(&self, config: &Config) -> Result<(), ConfigError> {
        at_most(config, "num_hidden_layers", self.layers, LAYERS_MAX)?;
        check_width(config, "hidden_size", self.hidden)?;
        check_width(config, "vocab_size", self.vocab)?;
        check_width(config, "num_attention_heads", self.heads)?;
        at_most(config, "head_dim", self.head_dim, WIDTH_MAX / self.heads)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let allowed = format!("a divisor of num_attention_heads, {}", self.heads);
            return Err(config.invalid("num_key_value_heads", &allowed));
        }
        Ok(())
    }
}

/// Refuses a width that no model has.
pub(super) fn check_width(config: &Config, key: &str, width: usize) -> Result<(), ConfigError> {
    at_most(config, key, width, WIDTH_MAX)
}

fn at_most(config: &Config, key: &str, value: usize, most: usize) -> Result<(), ConfigError> {
    if value <= most { Ok(()) } else { Err(config.invalid(key, &format!("at most {most}"))) }
}
