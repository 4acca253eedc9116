//! The owner's request to serve no layers: a file in the data directory, so that it survives a
//! restart.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use hearthnet_platform::machine::{LocalTime, local_time};
use hearthnet_platform::regular_file;
use serde::{Deserialize, Serialize};

use crate::cli::Failure;
use crate::cli::args::TimeOfDay;
use crate::home::community::now_ms;
use crate::home::paths::{remove_file, replace_file};

const PAUSE_FILE: &str = "paused.json";

/// Longest file in bytes.
const MAX_BYTES: u64 = 1024;

const MINUTE_MS: u64 = 60_000;

/// Request to serve no layers to others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Paused {
    /// Wall-clock time at which it ends, in ms since 1970; `None`: with `resume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until_ms: Option<u64>,
}

impl Paused {
    pub(crate) fn holds_at(&self, now_ms: u64) -> bool {
        self.until_ms.is_none_or(|until| now_ms < until)
    }

    /// Request in a data directory, if it has not ended. A damaged file is a request without an
    /// end, because serving against the owner's wish is worse than not serving.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        let paused: Self = match regular_file::read(&dir.join(PAUSE_FILE), MAX_BYTES) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(_) => Self::default(),
        };
        Some(paused).filter(|paused| paused.holds_at(now_ms()))
    }

    /// Writes or, without a request, removes the file.
    pub(crate) fn write(request: Option<Self>, dir: &Path) -> Result<(), Failure> {
        let path = dir.join(PAUSE_FILE);
        let Some(paused) = request else {
            return remove_file(&path);
        };
        let json = serde_json::to_vec(&paused).map_err(Failure::internal)?;
        replace_file(&path, &json)
    }
}

/// Formats as `paused by you until 22:00`, with the date unless that is within a day.
impl fmt::Display for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("paused by you")?;
        let Some(until) = self.until_ms else {
            return Ok(());
        };
        let Some(LocalTime { date, minute }) = local_time(until) else {
            return Ok(());
        };
        f.write_str(" until ")?;
        if until.saturating_sub(now_ms()) >= 24 * 60 * MINUTE_MS {
            let (year, month, day) = date;
            write!(f, "{year}-{month:02}-{day:02} ")?;
        }
        write!(f, "{}", TimeOfDay { minute })
    }
}

/// Next moment after `now_ms` at which clocks of `zone` show a time of day, in ms since 1970. If a
/// change of the clocks leaves that time out, the moment is on the day after. `None` if the zone
/// tells no time.
pub(crate) fn next_time(
    time: TimeOfDay,
    now_ms: u64,
    zone: impl Fn(u64) -> Option<LocalTime>,
) -> Option<u64> {
    let minute = now_ms / MINUTE_MS * MINUTE_MS;
    let minutes = (1..=50 * 60).map(|after| minute.saturating_add(after * MINUTE_MS));
    let mut minutes = minutes.take_while(|at| *at < u64::MAX);
    minutes.find(|at| zone(*at).is_some_and(|local| local.minute == time.minute))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_in_its_directory_until_it_ends_or_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Paused::read(dir.path()), None);
        let later = Some(now_ms() + 3_600_000);
        for until_ms in [None, later] {
            let request = Some(Paused { until_ms });
            Paused::write(request, dir.path()).unwrap();
            assert_eq!(Paused::read(dir.path()), request);
        }
        let until_ms = Some(now_ms() - 1);
        Paused::write(Some(Paused { until_ms }), dir.path()).unwrap();
        assert_eq!(Paused::read(dir.path()), None);
        Paused::write(None, dir.path()).unwrap();
        Paused::write(None, dir.path()).unwrap();
        assert!(!dir.path().join(PAUSE_FILE).exists());
    }

    #[test]
    fn a_damaged_request_has_no_end() {
        let dir = tempfile::tempdir().unwrap();
        let damaged = Some(Paused::default());
        for bytes in [&b""[..], b"{", b"{\"until_ms\":-1}", &[b' '; 2000]] {
            std::fs::write(dir.path().join(PAUSE_FILE), bytes).unwrap();
            assert_eq!(Paused::read(dir.path()), damaged);
        }
    }

    #[test]
    fn the_end_is_shown_with_its_date_if_it_is_far() {
        let text = |until_ms| Paused { until_ms }.to_string();
        assert_eq!(text(None), "paused by you");
        let length = |hours: u64| text(Some(now_ms() + hours * 3_600_000)).len();
        assert_eq!(length(2), "paused by you until 22:00".len());
        assert_eq!(length(50), "paused by you until 2026-11-27 22:00".len());
        assert_eq!(text(Some(u64::MAX)), "paused by you");
    }

    #[test]
    fn a_time_of_day_is_the_next_one_also_over_a_change_of_the_clocks() {
        const HOUR: u64 = 60;
        // Zone an hour ahead, and from minute 10:00 of the second day on two hours ahead.
        let zone = |ms: u64| {
            let minute = ms / MINUTE_MS;
            let ahead = if minute < 34 * HOUR { HOUR } else { 2 * HOUR };
            let minute = u16::try_from((minute + ahead) % (24 * HOUR)).ok()?;
            Some(LocalTime {
                date: (1970, 1, 1),
                minute,
            })
        };
        let next = |minute: u16, now: u64| {
            let at = next_time(TimeOfDay { minute }, now * MINUTE_MS + 59_999, zone);
            at.map(|at| at / MINUTE_MS)
        };
        assert_eq!(next(13 * 60, 0), Some(12 * HOUR));
        assert_eq!(next(60, 0), Some(24 * HOUR));
        assert_eq!(next(13 * 60, 12 * HOUR), Some(35 * HOUR));
        // 11:30 does not exist on the second day.
        assert_eq!(next(11 * 60 + 30, 11 * HOUR), Some(57 * HOUR + 30));
        assert_eq!(next_time(TimeOfDay { minute: 0 }, 0, |_| None), None);
    }
}
