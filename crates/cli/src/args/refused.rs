//! Flags of mlx-lm that lmx does not have yet. They are known, so that the error can name them, and refused, so
//! that none is silently ignored; before any weight is loaded.

use crate::end::End;

/// A flag, whether it was given, and why it is refused.
type Refusal = (&'static str, bool, &'static str);

fn refuse(refusals: &[Refusal]) -> Result<(), End> {
    match refusals.iter().find(|(_, given, _)| *given) {
        Some((flag, _, why)) => Err(End::Usage(format!("{flag} is not supported yet: {why}"))),
        None => Ok(()),
    }
}

const ACTIVATIONS: &str = "lmx chooses the precision of activations itself; leave the flag out";
const IMAGE: &str = "lmx runs text models only; leave the flag out";

/// The flags that `lmx generate` refuses.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RefusedByGenerate {
    #[arg(long, hide = true, value_name = "FILE", num_args = 1..)]
    image: Vec<String>,
    #[arg(long, hide = true)]
    quantize_activations: bool,
}

impl RefusedByGenerate {
    /// # Errors
    /// Names the first flag that was given.
    pub(crate) fn check(&self) -> Result<(), End> {
        refuse(&[
            ("--image", !self.image.is_empty(), IMAGE),
            ("--quantize-activations (-qa)", self.quantize_activations, ACTIVATIONS),
        ])
    }
}

/// The flags that `lmx benchmark` refuses.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RefusedByBenchmark {
    #[arg(long, hide = true)]
    pipeline: bool,
    #[arg(long, hide = true)]
    quantize_activations: bool,
}

impl RefusedByBenchmark {
    /// # Errors
    /// Names the first flag that was given.
    pub(crate) fn check(&self) -> Result<(), End> {
        refuse(&[
            ("--pipeline", self.pipeline, "lmx runs on one machine; leave the flag out"),
            ("--quantize-activations (-qa)", self.quantize_activations, ACTIVATIONS),
        ])
    }
}
