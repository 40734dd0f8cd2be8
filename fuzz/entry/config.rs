//! Reads any bytes as a `config.json` and, where a family accepts it, uses what it says. Shared by the fuzz target and
//! the replay test.

use lmx::models::{Config, families};

/// Whether the input is accepted. None may panic, hang or take memory out of proportion.
pub(crate) fn run(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(config) = Config::from_json(&text, "config.json") else { return false };
    let Ok(decoder) = families::describe(&config) else { return false };
    for rope in &decoder.ropes {
        let half = rope.dims() / 2;
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        for position in [0, 1, 4095, u32::MAX] {
            rope.fill(position, position % 2 == 0, &mut cos, &mut sin);
        }
    }
    let _ = (config.notices(), config.unread());
    true
}
