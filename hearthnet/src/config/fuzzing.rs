//! Body of the fuzz target `configuration`, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use std::path::Path;

use super::loaded::check;
use super::sources::Source;

/// Reads bytes as a configuration file, and its first lines as `--set` flags.
///
/// # Panics
/// If an error does not name its source, or names a line that the file does not have.
pub fn configuration(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Err(failure) = check(Path::new("c.toml"), &text) {
        let message = failure.to_string();
        let Some(rest) = message.strip_prefix("c.toml:") else {
            unreachable!("no source: {message}");
        };
        let number = rest.split(':').next().unwrap_or_default();
        if let Ok(line) = number.parse::<usize>() {
            assert!((1..=text.split('\n').count()).contains(&line), "{message}");
        }
    }
    for line in text.lines().take(8) {
        if let Err(failure) = Source::of_flag(line) {
            let message = failure.to_string();
            assert!(message.starts_with("--set "), "{message}");
        }
    }
}
