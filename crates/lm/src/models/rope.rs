//! Rotary position encodings: pairs of a head's dimensions are turned by the angle `position * inverse frequency`.
//!
//! Formulas follow `modeling_rope_utils.py` of transformers, except that the dynamic type takes a position's own
//! length `position + 1`, as token by token decoding does there, so that no result depends on chunking.

use std::f64::consts::PI;
use std::fmt;

use serde_json::Value;

use super::config::{Config, ConfigError};

/// What the `rope_type` of a configuration may say; `su` is an old name of `longrope`.
const KNOWN_TYPES: &str = "one of default, linear, dynamic, llama3, yarn, longrope, su";

/// A rotary position encoding.
#[derive(Clone, Debug)]
pub struct Rope {
    dims: usize,
    base: f64,
    traditional: bool,
    scaling: RopeScaling,
    /// Factor on cosines and sines.
    attention_factor: f32,
    /// One per pair of dimensions; the short ones for longrope.
    inverse_frequencies: Vec<f32>,
    /// Where long contexts have inverse frequencies of their own (longrope).
    long_inverse_frequencies: Option<Vec<f32>>,
}

/// How the inverse frequencies differ from `base^(-2i/dims)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All divided by `factor`.
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// The base grows with the position once that exceeds the original context.
    Dynamic {
        /// Above 0.
        factor: f64,
        /// Tokens up to which nothing is scaled.
        original_context: usize,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Wavelengths above `original_context / low` are scaled.
        low: f64,
        /// Wavelengths below `original_context / high` are kept.
        high: f64,
        /// Tokens of the original training context.
        original_context: usize,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp over dimensions between (YaRN).
    Yarn {
        /// Above 0.
        factor: f64,
        /// Turns over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Turns over the original context below which a dimension is scaled.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Tokens of the original training context.
        original_context: usize,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
    /// One divisor per pair of dimensions, of which there are two sets: for requests within the original context and
    /// for longer ones.
    LongRope {
        /// Divisors within the original context, `dims / 2` of them.
        short: Vec<f32>,
        /// Divisors beyond, `dims / 2` of them.
        long: Vec<f32>,
        /// Tokens of the original training context.
        original_context: usize,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
    /// One divisor per pair of dimensions, which GGUF files store ready made.
    Divisors(Vec<f32>),
}

impl Rope {
    /// A rotation of the first `dims` dimensions of a head (even, at least 2; above 2 if dynamic). `traditional` pairs
    /// dimensions 2i and 2i + 1 instead of i and i + dims/2.
    pub fn new(dims: usize, base: f64, traditional: bool, scaling: RopeScaling) -> Self {
        let plain = |divisor: &dyn Fn(usize, f64) -> f64| -> Vec<f32> {
            (0..dims / 2)
                .map(|pair| {
                    let frequency = base.powf(-2.0 * pair as f64 / dims as f64);
                    (frequency / divisor(pair, frequency)) as f32
                })
                .collect()
        };
        let by = |divisors: &[f32]| {
            plain(&|pair, _| divisors.get(pair).map_or(1.0, |divisor| f64::from(*divisor)))
        };
        let mut attention = 1.0;
        let mut long_inverse_frequencies = None;
        let inverse_frequencies = match &scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => plain(&|_, _| 1.0),
            RopeScaling::Linear { factor } => plain(&|_, _| *factor),
            RopeScaling::Llama3 { factor, low, high, original_context } => plain(&|_, frequency| {
                let turns = *original_context as f64 * frequency / (2.0 * PI);
                let kept = if low < high {
                    ((turns - low) / (high - low)).clamp(0.0, 1.0)
                } else {
                    f64::from(turns > *high)
                };
                1.0 / (kept + (1.0 - kept) / factor)
            }),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_context,
                attention_factor,
            } => {
                attention = *attention_factor;
                let (low, high) = yarn_ramp(dims, base, *beta_fast, *beta_slow, *truncate, *original_context);
                plain(&|pair, _| {
                    let kept = 1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    1.0 / (kept + (1.0 - kept) / factor)
                })
            }
            RopeScaling::LongRope { short, long, attention_factor, .. } => {
                attention = *attention_factor;
                long_inverse_frequencies = Some(by(long));
                by(short)
            }
            RopeScaling::Divisors(divisors) => by(divisors),
        };
        let attention_factor = attention as f32;
        Self {
            dims,
            base,
            traditional,
            scaling,
            attention_factor,
            inverse_frequencies,
            long_inverse_frequencies,
        }
    }

    /// The base of the frequencies.
    pub fn base(&self) -> f64 {
        self.base
    }

    /// The dimensions of a head that are rotated, from its first.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Whether dimensions 2i and 2i + 1 make a pair, instead of i and i + dims/2.
    pub fn traditional(&self) -> bool {
        self.traditional
    }

    /// How the inverse frequencies are scaled.
    pub fn scaling(&self) -> &RopeScaling {
        &self.scaling
    }

    /// Requests of more tokens than this need the frequencies for long contexts (longrope).
    pub fn original_context(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::LongRope { original_context, .. } => Some(original_context),
            _ => None,
        }
    }

    /// The tokens that a model of `max_position_embeddings` can hold with this scaling. Only YaRN and dynamic scaling
    /// are switched on over an unchanged `max_position_embeddings`.
    pub(crate) fn context_length(&self, max_position_embeddings: usize) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { factor, original_context }
            | RopeScaling::Yarn { factor, original_context, .. } => {
                max_position_embeddings.max((factor * original_context as f64) as usize)
            }
            _ => max_position_embeddings,
        }
    }

    /// Cosines and sines of one position, `dims / 2` each, with the attention factor folded in. `long_context` says
    /// that the request exceeds [`Rope::original_context`].
    pub fn fill(&self, position: u32, long_context: bool, cos: &mut [f32], sin: &mut [f32]) {
        let grown = self.grown_inverse_frequencies(position);
        let inverse_frequencies = match (&grown, &self.long_inverse_frequencies) {
            (Some(grown), _) => grown,
            (None, Some(long)) if long_context => long,
            _ => &self.inverse_frequencies,
        };
        for ((cos, sin), inverse_frequency) in cos.iter_mut().zip(sin).zip(inverse_frequencies) {
            let angle = f64::from(position as f32 * inverse_frequency);
            *cos = angle.cos() as f32 * self.attention_factor;
            *sin = angle.sin() as f32 * self.attention_factor;
        }
    }

    /// The inverse frequencies at a position beyond the original context of the dynamic type.
    fn grown_inverse_frequencies(&self, position: u32) -> Option<Vec<f32>> {
        let RopeScaling::Dynamic { factor, original_context } = self.scaling else { return None };
        let length = f64::from(position) + 1.0;
        let original = original_context as f64;
        if length <= original {
            return None;
        }
        let dims = self.dims as f64;
        let base = self.base * (factor * length / original - (factor - 1.0)).powf(dims / (dims - 2.0));
        Some((0..self.dims / 2).map(|pair| base.powf(-2.0 * pair as f64 / dims) as f32).collect())
    }
}

/// The pairs between which YaRN goes from kept to scaled frequencies.
fn yarn_ramp(
    dims: usize,
    base: f64,
    fast: f64,
    slow: f64,
    truncate: bool,
    original_context: usize,
) -> (f64, f64) {
    let pair_of =
        |turns: f64| dims as f64 * (original_context as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
    let (mut low, mut high) = (pair_of(fast), pair_of(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
    (low, if low == high { high + 0.001 } else { high })
}

/// `traditional` and the like matter to few: the line names the base, the scaling and what is not the whole head.
impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scaling {
            RopeScaling::Default => write!(f, "default"),
            RopeScaling::Linear { factor } => write!(f, "linear, factor {factor}"),
            RopeScaling::Dynamic { factor, original_context } => {
                write!(f, "dynamic, factor {factor}, original context {original_context}")
            }
            RopeScaling::Llama3 { factor, original_context, .. } => {
                write!(f, "llama3, factor {factor}, original context {original_context}")
            }
            RopeScaling::Yarn { factor, original_context, .. } => {
                write!(f, "yarn, factor {factor}, original context {original_context}")
            }
            RopeScaling::LongRope { original_context, .. } => {
                write!(f, "longrope, original context {original_context}")
            }
            RopeScaling::Divisors(_) => write!(f, "stored divisors"),
        }?;
        write!(f, ", base {}, {} dims", self.base, self.dims)
    }
}

/// What a family says about its rotary encoding where the configuration does not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeDefaults {
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// The base where no key gives one.
    pub(crate) base: f64,
    /// The key that holds the base beside the scaling's object.
    pub(crate) base_key: &'static str,
    /// Whether neighbours make a pair where `rope_traditional` does not say.
    pub(crate) traditional: bool,
    /// Whether the family rotates only `partial_rotary_factor` of a head when told so.
    pub(crate) partial: bool,
    /// `max_position_embeddings`, or the family's default.
    pub(crate) max_positions: usize,
    /// The original context where no key gives one: `max_positions` in most families.
    pub(crate) original_context: usize,
}

impl Rope {
    /// Reads the encoding of all layers: `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
    pub(crate) fn from_config(config: &Config, defaults: &RopeDefaults) -> Result<Self, ConfigError> {
        let (old, new) = ("rope_scaling", "rope_parameters");
        let section = match (config.get(old), config.get(new)) {
            (Some(older), Some(newer)) if older != newer => {
                return Err(config.invalid(old, "absent beside rope_parameters, which says otherwise"));
            }
            (Some(_), None) => old,
            _ => new,
        };
        Self::from_section(config, section, defaults)
    }

    /// Reads the encoding described by the object at key `section`, which may be absent.
    pub(crate) fn from_section(
        config: &Config,
        section: &str,
        defaults: &RopeDefaults,
    ) -> Result<Self, ConfigError> {
        if config.get(section).is_some_and(|value| !value.is_object()) {
            return Err(config.invalid(section, "an object"));
        }
        let key = |name: &str| format!("{section}.{name}");
        let outer_base = config.positive_or(defaults.base_key, defaults.base)?;
        let base = config.positive_or(&key("rope_theta"), outer_base)?;
        if base <= 1.0 {
            return Err(config.invalid(defaults.base_key, "a number above 1"));
        }
        let mut dims = defaults.head_dim;
        if defaults.partial {
            let outer = config.positive_or("partial_rotary_factor", 1.0)?;
            let partial = config.positive_or(&key("partial_rotary_factor"), outer)?;
            dims = (dims as f64 * partial) as usize;
        }
        if dims < 2 || !dims.is_multiple_of(2) || dims > defaults.head_dim {
            let allowed = format!(
                "so that an even number from 2 to {} of dimensions is rotated, not {dims}",
                defaults.head_dim
            );
            return Err(
                config.invalid(if defaults.partial { "partial_rotary_factor" } else { "head_dim" }, &allowed)
            );
        }
        let traditional = config.flag_or("rope_traditional", defaults.traditional)?;
        let scaling = read_scaling(config, section, dims, defaults)?;
        Ok(Self::new(dims, base, traditional, scaling))
    }
}

fn read_scaling(
    config: &Config,
    section: &str,
    dims: usize,
    defaults: &RopeDefaults,
) -> Result<RopeScaling, ConfigError> {
    let key = |name: &str| format!("{section}.{name}");
    let factor = |default: Option<f64>| -> Result<f64, ConfigError> {
        let found = config.positive_opt(&key("factor"))?.or(default);
        found.ok_or_else(|| config.missing(&key("factor"), "a number above 0"))
    };
    let old_type = config.text_opt(&key("type"))?;
    let type_key = key("rope_type");
    let (type_key, rope_type) = match config.text_opt(&type_key)? {
        Some(rope_type) => (type_key, rope_type),
        None => (key("type"), old_type.unwrap_or("default")),
    };
    // transformers: the key beside the object wins over the one in it.
    let inner_context =
        config.size_or(&key("original_max_position_embeddings"), defaults.original_context)?;
    let original_context = config.size_or("original_max_position_embeddings", inner_context)?;
    let stretch = defaults.max_positions as f64 / original_context as f64;
    Ok(match rope_type {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor(None)? },
        "dynamic" if dims > 2 => {
            RopeScaling::Dynamic { factor: factor(None)?, original_context: defaults.max_positions }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: factor(None)?,
            low: config.positive_or(&key("low_freq_factor"), 1.0)?,
            high: config.positive_or(&key("high_freq_factor"), 4.0)?,
            original_context,
        },
        "yarn" => {
            let factor = factor(Some(stretch))?;
            RopeScaling::Yarn {
                factor,
                beta_fast: config.positive_or(&key("beta_fast"), 32.0)?,
                beta_slow: config.positive_or(&key("beta_slow"), 1.0)?,
                truncate: config.flag_or(&key("truncate"), true)?,
                original_context,
                attention_factor: yarn_attention_factor(config, section, factor)?,
            }
        }
        "longrope" | "su" => {
            let divisors = |name: &str| {
                let list = config.list_opt(&key(name), dims / 2, "numbers above 0", positive)?;
                list.ok_or_else(|| {
                    config.missing(&key(name), &format!("a list of {} numbers above 0", dims / 2))
                })
            };
            let factor = factor(Some(stretch))?;
            // An original context of 1 would divide by zero.
            let scale = |factor: f64| (1.0 + factor.ln() / (original_context.max(2) as f64).ln()).sqrt();
            let implied = if factor <= 1.0 { 1.0 } else { scale(factor) };
            RopeScaling::LongRope {
                short: divisors("short_factor")?,
                long: divisors("long_factor")?,
                original_context,
                attention_factor: config.positive_or(&key("attention_factor"), implied)?,
            }
        }
        DIVISORS => {
            let divisors = config.list_opt(&key(DIVISORS), dims / 2, "numbers above 0", positive)?;
            RopeScaling::Divisors(
                divisors.ok_or_else(|| config.missing(&key(DIVISORS), "a list of numbers above 0"))?,
            )
        }
        _ => return Err(config.invalid(&type_key, KNOWN_TYPES)),
    })
}

/// The `rope_type`, and the key of its list, under which the GGUF reader passes on stored divisors.
pub(crate) const DIVISORS: &str = "divisors";

fn positive(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| *number > 0.0 && number.is_finite())
}

/// `attention_factor`, else what `mscale` and `mscale_all_dim` give together, else the paper's `0.1 ln(factor) + 1`.
fn yarn_attention_factor(config: &Config, section: &str, factor: f64) -> Result<f64, ConfigError> {
    let number = |name: &str| config.number_opt(&format!("{section}.{name}"));
    let attention_factor = config.positive_opt(&format!("{section}.attention_factor"))?;
    let (mscale, mscale_all) = (number("mscale")?.unwrap_or(0.0), number("mscale_all_dim")?.unwrap_or(0.0));
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    Ok(match attention_factor {
        Some(attention_factor) => attention_factor,
        None if mscale != 0.0 && mscale_all != 0.0 => scale(mscale) / scale(mscale_all),
        None => scale(1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Divisors of the frequencies `10000^(-2i/8)`, computed by mlx-lm.
    fn assert_frequencies(rope: &Rope, inverse: [f32; 4]) {
        for (found, wanted) in rope.inverse_frequencies.iter().zip(inverse) {
            assert!((found * wanted - 1.0).abs() < 1e-6, "{:?}", rope.inverse_frequencies);
        }
    }

    #[test]
    fn llama3_equals_mlx() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 32 };
        assert_frequencies(&Rope::new(8, 1e4, false, scaling), [1.0, 80.0, 800.0, 8000.0]);
    }

    #[test]
    fn yarn_equals_mlx() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            original_context: 64,
            attention_factor: 1.0,
        };
        assert_frequencies(&Rope::new(8, 1e4, false, scaling), [1.0, 16.0, 400.0, 4000.0]);
    }

    #[test]
    fn longrope_has_two_sets() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![1.0, 2.0, 3.0, 4.0],
            original_context: 4096,
            attention_factor: 1.190_238,
        };
        let rope = Rope::new(8, 1e4, false, scaling);
        assert_frequencies(&rope, [1.0, 10.0, 100.0, 1000.0]);
        let (mut short, mut long, mut sin) = ([0.0; 4], [0.0; 4], [0.0; 4]);
        rope.fill(0, false, &mut short, &mut sin);
        assert_eq!(short, [1.190_238; 4]);
        rope.fill(100, false, &mut short, &mut sin);
        rope.fill(100, true, &mut long, &mut sin);
        assert_eq!(short[0], long[0]);
        assert_eq!(long[1], 5f32.cos() * 1.190_238);
        assert_eq!(short[1], 10f32.cos() * 1.190_238);
        assert_eq!(rope.original_context(), Some(4096));
    }

    #[test]
    fn dynamic_grows_with_the_position_alone() {
        let rope = Rope::new(8, 1e4, false, RopeScaling::Dynamic { factor: 2.0, original_context: 16 });
        let plain = Rope::new(8, 1e4, false, RopeScaling::Default);
        let (mut cos, mut sin, mut wanted) = ([0.0; 4], [0.0; 4], [0.0; 4]);
        rope.fill(15, false, &mut cos, &mut sin);
        plain.fill(15, false, &mut wanted, &mut sin);
        assert_eq!(cos, wanted);
        rope.fill(31, false, &mut cos, &mut sin);
        // Length 32: base 10000 · (2·32/16 − 1)^(8/6).
        Rope::new(8, 1e4 * 3f64.powf(8.0 / 6.0), false, RopeScaling::Default).fill(
            31,
            false,
            &mut wanted,
            &mut sin,
        );
        assert_eq!(cos, wanted);
    }
}
