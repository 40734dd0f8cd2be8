//! Progress bars for what may take long: on standard error, and only if a person sees it.

use crate::terminal;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// Work that is done sooner shows no bar.
const PATIENCE: Duration = Duration::from_millis(400);

/// How often a bar shows that time passes.
const TICK: Duration = Duration::from_millis(200);

/// One task's bar. It removes itself when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    task: &'static str,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Begins the task.
    pub(crate) fn new(task: &'static str) -> Self {
        Self { task, started: Instant::now(), bar: None }
    }

    /// Begins a task of `total` units that reports seldom: the bar shows at once, and that time passes.
    pub(crate) fn slow(task: &'static str, total: u64) -> Self {
        let bar = terminal::is_watched().then(|| {
            let bar = bar(task);
            bar.set_length(total);
            bar.enable_steady_tick(TICK);
            bar
        });
        Self { bar, ..Self::new(task) }
    }

    /// `done` of `total` units are done.
    pub(crate) fn set(&mut self, done: u64, total: u64) {
        if self.bar.is_none() && terminal::is_watched() && self.started.elapsed() >= PATIENCE && done < total
        {
            self.bar = Some(bar(self.task));
        }
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(task: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    // The template is ours and valid; without a style indicatif's own bar is shown.
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {percent}% {elapsed}") {
        bar.set_style(style);
    }
    bar.with_message(task)
}
