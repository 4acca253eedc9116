//! Quiet hours that the owner set on the page: a file in the data directory, so that they survive a
//! restart. They replace `manners.quiet_hours`.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use hearthnet_platform::regular_file;

use crate::cli::{Failure, note};
use crate::config::{QuietHours, parse_quiet_hours};
use crate::home::paths::{remove_file, replace_file};

const HOURS_FILE: &str = "quiet_hours.txt";

/// Longest file in bytes.
const MAX_BYTES: u64 = 64;

/// Quiet hours, in the place of those of the configuration. `None`: no hours are quiet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct OwnHours(pub(crate) Option<QuietHours>);

impl OwnHours {
    /// Hours in a data directory. `None` if there are none, or if the file is damaged, of which the
    /// user is told.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        let path = dir.join(HOURS_FILE);
        let hours = match regular_file::read_text(&path, MAX_BYTES) {
            Ok(text) => parse_quiet_hours(text.trim()),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => Err(error.to_string()),
        };
        match hours {
            Ok(hours) => Some(Self(hours)),
            Err(why) => {
                let file = path.display();
                note(format!(
                    "the quiet hours are those of the configuration: {file}: {why}"
                ));
                None
            }
        }
    }

    /// Writes or, with `None`, removes the file.
    pub(crate) fn write(own: Option<Self>, dir: &Path) -> Result<(), Failure> {
        let path = dir.join(HOURS_FILE);
        match own {
            Some(own) => replace_file(&path, own.to_string().as_bytes()),
            None => remove_file(&path),
        }
    }
}

/// Formats as in the configuration.
impl fmt::Display for OwnHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(hours) => write!(f, "{hours}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_survive_in_their_directory_and_damage_leaves_those_of_the_configuration() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(OwnHours::read(dir.path()), None);
        for text in ["22:00-07:00", "00:00-23:59", ""] {
            let own = Some(OwnHours(parse_quiet_hours(text).unwrap()));
            OwnHours::write(own, dir.path()).unwrap();
            let read = OwnHours::read(dir.path());
            assert_eq!(read, own);
            assert_eq!(read.unwrap().to_string(), text);
        }
        for damaged in [&b"22:00"[..], b"\xff", b"25:00-07:00", &[b' '; 200]] {
            std::fs::write(dir.path().join(HOURS_FILE), damaged).unwrap();
            assert_eq!(OwnHours::read(dir.path()), None);
        }
        OwnHours::write(None, dir.path()).unwrap();
        OwnHours::write(None, dir.path()).unwrap();
        assert!(!dir.path().join(HOURS_FILE).exists());
    }
}
