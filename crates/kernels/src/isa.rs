//! Which instruction set the kernels use. An [`Isa`] can only be obtained through a check of the running CPU,
//! so holding one is the proof that `unsafe` calls of `#[target_feature]` functions rest on.

use crate::simd::Kernel;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use std::fmt;
use std::sync::OnceLock;

/// The levels, from the definition of every kernel to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust; the specification of every kernel.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// The above with AMX int8 and bf16 tiles, permitted by the operating system.
    Amx,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Avx2, Level::Avx512, Level::Amx];

    /// The name used by `LMX_ISA` and `lmx inspect`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
        }
    }

    fn available(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Amx => {
                Level::Avx512.available() && is_x86_feature_detected!("avx512vbmi") && amx_permitted()
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// A level that this CPU has been checked to support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

impl Isa {
    /// The scalar level, which every CPU has.
    pub const SCALAR: Isa = Isa(Level::Scalar);

    /// The fastest level of this CPU.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            Isa(Level::ALL.into_iter().rev().find(|l| l.available()).unwrap_or(Level::Scalar))
        })
    }

    /// `level`, if this CPU (and, for AMX, the operating system) supports it.
    #[must_use]
    pub fn new(level: Level) -> Option<Self> {
        level.available().then_some(Isa(level))
    }

    /// Every level of this CPU, lowest first.
    pub fn all() -> impl Iterator<Item = Isa> {
        Level::ALL.into_iter().filter_map(Isa::new)
    }

    /// The level.
    #[must_use]
    pub fn level(self) -> Level {
        self.0
    }
}

impl Isa {
    /// Runs `kernel` in its form for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Level::Scalar => kernel.scalar(),
            // SAFETY: holding an `Isa` of this level proves that the CPU has its features.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => unsafe { run_avx512(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => kernel.scalar(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are this function's own.
    kernel.simd(unsafe { Avx2::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are this function's own.
    kernel.simd(unsafe { Avx512::new() })
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

/// Asks Linux for the AMX tile state, once per process. A refusal (an old kernel, a container, a host with a
/// small signal stack) means that there is no AMX here; it is never an error.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        let leaf7 = std::arch::x86_64::__cpuid_count(7, 0);
        // EDX bits 22, 24, 25: AMX-BF16, AMX-TILE, AMX-INT8.
        let has_amx = [22, 24, 25].iter().all(|bit| leaf7.edx >> bit & 1 == 1);
        // SAFETY: arch_prctl(ARCH_REQ_XCOMP_PERM) only sets a permission bit of this process.
        has_amx
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_permitted() -> bool {
    false
}
