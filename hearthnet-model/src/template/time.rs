//! The time that a template may print.

/// A point in time, in UTC, for templates that print the date.
///
/// There is no clock in here: the caller says what time it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateTime {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 0 to 365.
    day_of_year: i64,
    /// 0 to 6, from Sunday.
    weekday: i64,
    /// 0 to 86,399.
    second_of_day: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const SECONDS_PER_DAY: i64 = 86_400;

impl TemplateTime {
    /// Seconds since 1970-01-01 00:00 UTC, leap seconds not counted.
    pub fn from_unix(seconds: u64) -> Self {
        // Beyond the year 9999 every second is the last one.
        let seconds = i64::try_from(seconds)
            .unwrap_or(i64::MAX)
            .min(253_402_300_799);
        let days = seconds / SECONDS_PER_DAY;
        // "Days to civil", Howard Hinnant, chrono-compatible low-level date algorithms: years
        // begin in March, so that the leap day is a year's last.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let march_day = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * march_day + 2) / 153;
        let day = march_day - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let day_of_year = if month <= 2 {
            march_day - 306
        } else {
            march_day + 59 + i64::from(leap)
        };
        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4) % 7, // 1970-01-01 was a Thursday.
            second_of_day: seconds % SECONDS_PER_DAY,
        }
    }

    /// Formats as C's `strftime` does, in English. Directives: `%Y %y %m %d %e %j %B %b %A %a %H
    /// %I %p %M %S %%`, and `%-d` and the like without padding.
    pub(super) fn format(&self, format: &str) -> Result<String, String> {
        let hour = self.second_of_day / 3600;
        let twelve = (hour + 11) % 12 + 1;
        let name = |names: &[&'static str], index: i64| {
            usize::try_from(index)
                .ok()
                .and_then(|index| names.get(index))
                .copied()
                .unwrap_or("")
        };
        let short = |name: &str| name.chars().take(3).collect::<String>();
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut directive = chars.next();
            let padded = directive != Some('-');
            if !padded {
                directive = chars.next();
            }
            let number = |value: i64, width: usize| {
                let width = if padded { width } else { 0 };
                format!("{value:0width$}")
            };
            text.push_str(&match directive {
                Some('Y') => number(self.year, 4),
                Some('y') => number(self.year % 100, 2),
                Some('m') => number(self.month, 2),
                Some('d') => number(self.day, 2),
                Some('e') if padded => format!("{:2}", self.day),
                Some('j') => number(self.day_of_year + 1, 3),
                Some('B') => name(&MONTHS, self.month - 1).to_owned(),
                Some('b') => short(name(&MONTHS, self.month - 1)),
                Some('A') => name(&WEEKDAYS, self.weekday).to_owned(),
                Some('a') => short(name(&WEEKDAYS, self.weekday)),
                Some('H') => number(hour, 2),
                Some('I') => number(twelve, 2),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('M') => number(self.second_of_day / 60 % 60, 2),
                Some('S') => number(self.second_of_day % 60, 2),
                Some('%') if padded => "%".to_owned(),
                Some(other) => return Err(format!("strftime_now does not know `%{other}`")),
                None => return Err("strftime_now: the format ends in `%`".to_owned()),
            });
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(seconds: u64, format: &str) -> String {
        TemplateTime::from_unix(seconds).format(format).unwrap()
    }

    #[test]
    fn known_days_are_named_right() {
        assert_eq!(
            show(0, "%A %d %B %Y %j %H:%M:%S"),
            "Thursday 01 January 1970 001 00:00:00"
        );
        // 2024-02-29 and 2024-12-31 are days 60 and 366 of a leap year.
        assert_eq!(
            show(1_709_164_800, "%a %-d %b %y, %j"),
            "Thu 29 Feb 24, 060"
        );
        assert_eq!(
            show(1_735_689_599, "%Y-%m-%d %j %I:%M:%S %p"),
            "2024-12-31 366 11:59:59 PM"
        );
        assert_eq!(
            show(951_782_400, "%e %B %Y, day %j"),
            "29 February 2000, day 060"
        );
        assert_eq!(show(1_785_196_800, "%d %b %Y"), "28 Jul 2026");
    }

    #[test]
    fn every_day_of_four_centuries_follows_the_one_before() {
        let day = |n: u64| TemplateTime::from_unix(n * 86_400);
        for n in 1..146_097 {
            let (before, this) = (day(n - 1), day(n));
            assert_eq!(this.weekday, (before.weekday + 1) % 7);
            if this.month == 1 && this.day == 1 {
                assert_eq!((this.day_of_year, this.year), (0, before.year + 1));
                assert_eq!((before.month, before.day), (12, 31));
            } else {
                assert_eq!(
                    (this.day_of_year, this.year),
                    (before.day_of_year + 1, before.year)
                );
                let same_month = (before.month, before.day + 1);
                assert!(
                    (this.month, this.day) == same_month
                        || (this.month, this.day) == (before.month + 1, 1)
                );
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
