//! What the figures were measured on, and the limit that its memory sets.

use super::trial::Sample;
use crate::device::default_kv_memory;
use lmx::Device;
use lmx::engine::Engine;
use lmx::models::LinearRole;
use serde::Serialize;
use std::time::Duration;

/// The machine as the figures' reader needs to know it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// The processor's name, as Linux tells it.
    pub(crate) processor: String,
    pub(crate) cpus: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) threads: usize,
    pub(crate) isa: String,
}

impl Machine {
    /// This machine, and how `device` uses it.
    pub(crate) fn of(device: &Device) -> Self {
        let value = |file: &str, key: &str| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.split_once(':'));
            line.map(|(_, value)| value.trim().to_owned())
        };
        let memory = value("/proc/meminfo", "MemTotal");
        let kibibytes = memory.and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        Self {
            processor: value("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kibibytes.unwrap_or(0) * 1024,
            threads: device.exec().pool.threads(),
            isa: device.exec().isa.to_string(),
        }
    }
}

/// The CPU time that the machine has spent, in Linux's ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    all: u64,
    busy: u64,
    own: u64,
}

impl CpuTime {
    /// Until now; `None` where the system does not tell.
    pub(crate) fn now() -> Option<Self> {
        let read = |file: &str| std::fs::read_to_string(file).ok();
        let machine = read("/proc/stat")?;
        // user, nice, system, idle, waiting for input, interrupts (two kinds), stolen
        let ticks: Vec<u64> = machine
            .lines()
            .next()?
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|n| n.parse().ok())
            .collect();
        let (all, idle): (u64, u64) = (ticks.iter().sum(), ticks.get(3)? + ticks.get(4)?);
        let own = read("/proc/self/stat")?;
        // Behind the name, which may hold blanks: the 14th and 15th fields are user and system time.
        let own =
            own.rsplit_once(')')?.1.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok());
        Some(Self { all, busy: all.saturating_sub(idle), own: own.sum() })
    }

    /// The share of the machine that other programs have taken until `later`; `None` after so little time that it would
    /// be rounding.
    pub(crate) fn others_until(&self, later: &Self) -> Option<f64> {
        let (all, busy) = (later.all.saturating_sub(self.all), later.busy.saturating_sub(self.busy));
        let own = later.own.saturating_sub(self.own);
        (all >= Self::TICKS_MIN).then(|| busy.saturating_sub(own) as f64 / all as f64)
    }

    /// Ticks of all CPUs together, most often of 10 ms each.
    const TICKS_MIN: u64 = 100;
}

/// The speed that memory allows: each step reads all weights once, and the keys and values of each sequence.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Roofline {
    /// Bytes per second that all threads read, the median of the passes.
    pub(crate) bandwidth: f64,
    /// Bytes of the weights that a step reads; `None` where it depends on the tokens, as with experts.
    pub(crate) weights_bytes: Option<u64>,
}

/// The probe's buffer, if there is so much memory: several times as large as most last caches.
const PROBE_BYTES: usize = 1 << 30;
const PROBE_TIME: Duration = Duration::from_millis(400);

impl Roofline {
    /// Measures the memory, and adds the model's weights up.
    pub(crate) fn measure(engine: &Engine) -> Self {
        let model = engine.model();
        // No more than half of what is free.
        let bytes = PROBE_BYTES.min(default_kv_memory());
        let passes = model.device().read_bandwidth(bytes, PROBE_TIME);
        let bandwidth = Sample::new(passes).map_or(0.0, |passes| passes.median());
        Self { bandwidth, weights_bytes: weights_bytes(engine) }
    }

    /// Tokens per second at most of `batch` sequences of `context` tokens each, of whose keys and values one reads
    /// `kv_bytes`.
    pub(crate) fn tokens_per_second(&self, batch: usize, kv_bytes: usize) -> Option<f64> {
        let step = self.weights_bytes? as f64 + (batch * kv_bytes) as f64;
        Some(batch as f64 * self.bandwidth / step)
    }
}

/// All matrices, but the embedding only where it is the head too: of a table of its own a step reads a few rows.
fn weights_bytes(engine: &Engine) -> Option<u64> {
    let (mut bytes, mut embedding, mut tied, mut experts) = (0, 0, true, false);
    engine.model().visit_linears(&mut |name, role, linear| {
        experts |= matches!(role, LinearRole::Expert(_));
        tied &= name != "lm_head";
        match role {
            LinearRole::Embedding => embedding += linear.bytes() as u64,
            _ => bytes += linear.bytes() as u64,
        }
    });
    (!experts).then_some(bytes + if tied { embedding } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_took() {
        let begin = CpuTime { all: 5000, busy: 3000, own: 700 };
        let later =
            |all: u64, busy: u64, own: u64| CpuTime { all: 5000 + all, busy: 3000 + busy, own: 700 + own };
        assert_eq!(begin.others_until(&later(200, 150, 100)), Some(0.25));
        assert_eq!(begin.others_until(&later(200, 100, 100)), Some(0.0));
        // The two counters are not read at the same moment.
        assert_eq!(begin.others_until(&later(200, 99, 100)), Some(0.0));
        assert_eq!(begin.others_until(&later(1, 1, 0)), None, "one tick is no share of anything");
        assert!(CpuTime::now().is_some_and(|now| now.all >= now.busy && now.busy > 0));
    }
}
