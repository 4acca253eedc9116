//! Time for templates that print the date.
//!
//! Of the supported families, Llama 3's templates print the day if `strftime_now` exists, and
//! gpt-oss's require it.

use std::fmt::Display;
use time::UtcDateTime;
use time::format_description::parse_strftime_borrowed;

/// Point in time in UTC.
///
/// This module reads no clock: the caller supplies the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateTime(UtcDateTime);

impl TemplateTime {
    /// Seconds since 1970-01-01 00:00 UTC, without leap seconds. Times after the year 9999 become
    /// its last second.
    pub fn from_unix(seconds: u64) -> Self {
        let seconds = i64::try_from(seconds).ok();
        let time = seconds.and_then(|seconds| UtcDateTime::from_unix_timestamp(seconds).ok());
        Self(time.unwrap_or(UtcDateTime::MAX))
    }

    /// Formats as C's `strftime` does, in English; `%-d` and the like omit the padding.
    pub(super) fn format(&self, format: &str) -> Result<String, String> {
        let failed = |error: &dyn Display| format!("strftime_now: `{format}`: {error}");
        let items = parse_strftime_borrowed(format).map_err(|error| failed(&error))?;
        self.0.format(&items).map_err(|error| failed(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::rows;

    fn show(seconds: u64, format: &str) -> String {
        TemplateTime::from_unix(seconds).format(format).unwrap()
    }

    #[test]
    fn known_days_are_named_right() {
        // 2024-02-29 and 2024-12-31 are days 60 and 366 of a leap year.
        for (seconds, format, expected) in rows! {
            0, "%A %d %B %Y %j %H:%M:%S" => "Thursday 01 January 1970 001 00:00:00";
            1_709_164_800, "%a %-d %b %y, %j" => "Thu 29 Feb 24, 060";
            1_735_689_599, "%Y-%m-%d %j %I:%M:%S %p" => "2024-12-31 366 11:59:59 PM";
            951_782_400, "%e %B %Y, day %j" => "29 February 2000, day 060";
            1_785_196_800, "%d %b %Y" => "28 Jul 2026";
        } {
            assert_eq!(show(seconds, format), expected);
        }
    }

    #[test]
    fn every_day_of_four_centuries_follows_the_one_before() {
        let day = |n: u64| {
            let shown = show(n * 86_400, "%Y %m %d %j %A");
            let mut parts = shown.split(' ').map(str::to_owned).collect::<Vec<_>>();
            let weekday = parts.pop().unwrap();
            let numbers = parts.iter().map(|part| part.parse().unwrap());
            (numbers.collect::<Vec<u32>>(), weekday)
        };
        let mut week: Vec<String> = (0..7).map(|n| day(n).1).collect();
        assert_eq!(week[0], "Thursday");
        for n in 1..146_097 {
            week.rotate_left(1);
            let ((before, _), (this, weekday)) = (day(n - 1), day(n));
            assert_eq!(weekday, week[0]);
            if this[1..3] == [1, 1] {
                assert_eq!((this[3], this[0]), (1, before[0] + 1));
                assert_eq!(before[1..3], [12, 31]);
            } else {
                assert_eq!((this[3], this[0]), (before[3] + 1, before[0]));
                let same_month = [before[1], before[2] + 1];
                assert!(this[1..3] == same_month || this[1..3] == [before[1] + 1, 1]);
            }
        }
    }

    #[test]
    fn an_unknown_directive_is_an_error() {
        let time = TemplateTime::from_unix(0);
        assert!(time.format("%Q").unwrap_err().contains("%Q"));
        assert!(time.format("100%").is_err());
    }

    #[test]
    fn the_end_of_time_is_the_last_second_of_the_year_9999() {
        assert_eq!(show(u64::MAX, "%d %b %Y %H:%M:%S"), "31 Dec 9999 23:59:59");
    }
}
