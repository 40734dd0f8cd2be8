//! Reproducible test data.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use lmx_kernels::{Exec, Isa};

/// A small linear congruential generator: the same numbers on every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        self.next() as f32 / (1_u32 << 30) as f32 - 1.0
    }

    pub(crate) fn vector(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| self.unit() * size).collect()
    }
}

/// Every level of this CPU with 1 and 2 threads; the first is the definition: scalar, 1 thread.
pub(crate) fn execs() -> Vec<Exec> {
    Isa::all().flat_map(|isa| [1, 2].map(|threads| Exec::new(isa, threads))).collect()
}

/// Bits for comparison; all NaNs are alike, since their payload is not defined.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| if v.is_nan() { 0x7FC0_0000 } else { v.to_bits() }).collect()
}

/// Runs `f` at every level and thread count, asserts that all results are the definition's bits, returns it.
pub(crate) fn same_everywhere(name: &str, f: impl Fn(&Exec) -> Vec<f32>) -> Vec<f32> {
    let execs = execs();
    let expected = f(&execs[0]);
    for exec in &execs[1..] {
        let got = f(exec);
        assert_eq!(got.len(), expected.len());
        for (i, (g, e)) in bits(&got).into_iter().zip(bits(&expected)).enumerate() {
            assert!(
                g == e,
                "{name}: element {i} is {} with {exec:?} and {} by definition",
                got[i],
                expected[i]
            );
        }
    }
    expected
}

/// max|a - b| / max|b|.
pub(crate) fn relative_error(a: &[f32], b: &[f64]) -> f64 {
    let size = b.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    let error = a.iter().zip(b).fold(0.0_f64, |m, (&a, &b)| m.max((f64::from(a) - b).abs()));
    error / size.max(f64::MIN_POSITIVE)
}
