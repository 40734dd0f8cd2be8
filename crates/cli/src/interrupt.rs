//! Ctrl-C. It ends the program, except while a [`Hold`] lives: then the first one only asks for the current work
//! to stop, and a second one, if that takes too long, ends the program after all.

use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering};

static HELD: AtomicBool = AtomicBool::new(false);
static PRESSED: AtomicBool = AtomicBool::new(false);

/// The exit code of a program that Ctrl-C ended: 128 + SIGINT.
pub(crate) const EXIT_CODE: u8 = 130;

/// Listens for Ctrl-C; called once.
pub(crate) fn listen() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        let already_pressed = PRESSED.swap(true, Ordering::SeqCst);
        if !HELD.load(Ordering::SeqCst) || already_pressed {
            std::process::exit(EXIT_CODE.into());
        }
    })
    .context("cannot listen for Ctrl-C")
}

/// Waits until the program is asked to stop: by Ctrl-C, or by SIGTERM. A second time ends it at once.
///
/// # Errors
/// If signals cannot be listened to.
pub(crate) async fn stop_signal() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(EXIT_CODE.into());
    });
    Ok(())
}

/// While it lives, Ctrl-C asks instead of ending the program.
#[derive(Debug)]
pub(crate) struct Hold(());

impl Hold {
    /// Begins; there is one at a time.
    pub(crate) fn new() -> Self {
        PRESSED.store(false, Ordering::SeqCst);
        HELD.store(true, Ordering::SeqCst);
        Self(())
    }

    /// Whether Ctrl-C was pressed since this began.
    pub(crate) fn is_pressed(&self) -> bool {
        PRESSED.load(Ordering::SeqCst)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        HELD.store(false, Ordering::SeqCst);
    }
}
