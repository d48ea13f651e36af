//! A sign of life on stderr for work that takes longer than a second, and only for a person watching.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Work shorter than this shows nothing: a flash of text is worse than none.
const PATIENCE: Duration = Duration::from_secs(1);

/// Shows a spinner until it is dropped.
pub(crate) struct Progress {
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Starts the clock. Shows nothing, ever, when stderr is no terminal or `UNHAND_NO_PROGRESS` is set.
    pub(crate) fn start(message: String) -> Progress {
        let is_wanted = std::io::stderr().is_terminal() && std::env::var_os("UNHAND_NO_PROGRESS").is_none();
        if !is_wanted {
            return Progress { watcher: None };
        }
        let (done, is_done) = channel::<()>();
        let thread = std::thread::spawn(move || {
            if is_done.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            let bar = ProgressBar::new_spinner()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
                .with_message(message)
                .with_elapsed(PATIENCE);
            bar.enable_steady_tick(Duration::from_millis(100));
            // Either a message or the dropped sender: the work is over.
            let _ = is_done.recv();
            bar.finish_and_clear();
        });
        Progress { watcher: Some((done, thread)) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.watcher.take() {
            drop(done);
            // The line must be gone before anything else is written.
            let _ = thread.join();
        }
    }
}
