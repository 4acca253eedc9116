//! Values of arguments that several commands take.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{OsStringValueParser, PathBufValueParser, TypedValueParser};
use hearthnet_hub::ModelRef;
use hearthnet_hub::reference::expand_home;

pub(super) const MODEL: &str = "Catalogue id, path of a GGUF file or a Hugging Face directory, hf:OWNER/REPOSITORY/FILE.gguf, or an https address";

pub(super) const MODEL_OR_DEFAULT: &str = "\
Catalogue id, path of a GGUF file or a Hugging Face directory, hf:OWNER/REPOSITORY/FILE.gguf, or an https address [default: \
model.default, else the community's model, else smollm2-135m-instruct]";

/// Path in which a leading `~/` is the home directory. Shells do not expand it in `--option=~/x`,
/// and systemd does not expand it in a service's environment.
pub(super) fn home_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().map(|path| expand_home(&path))
}

/// Model argument. Text that is not UTF-8 can only be a file's name.
pub(super) fn model_ref() -> impl TypedValueParser<Value = ModelRef> {
    OsStringValueParser::new().try_map(|text| match text.to_str() {
        Some(text) => text.parse(),
        None => Ok(ModelRef::Path(expand_home(Path::new(&text)))),
    })
}

/// Argument of `--layers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layers {
    /// Range that the community lacks most.
    Auto,
    Range(u32, u32),
}

pub(crate) fn parse_layers(text: &str) -> Result<Layers, String> {
    if text == "auto" {
        return Ok(Layers::Auto);
    }
    let wrong = || "write the first and the last layer, for example 0-14, or auto".to_owned();
    let (lo, hi) = text.split_once('-').ok_or_else(wrong)?;
    let layer = |text: &str| text.parse::<u32>().map_err(|_| wrong());
    let (lo, hi) = (layer(lo)?, layer(hi)?);
    if lo > hi {
        return Err(format!("the range {lo}-{hi} runs backwards"));
    }
    Ok(Layers::Range(lo, hi))
}

/// Checks `ADDRESS:PORT` or `NAME:PORT`. The name is not resolved.
pub(crate) fn parse_listen(text: &str) -> Result<String, String> {
    let is_name = |host: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        host.chars().all(plain) && host.chars().any(|c| c.is_ascii_alphabetic())
    };
    let named = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| is_name(host) && port.parse::<u16>().is_ok());
    match named || text.parse::<SocketAddr>().is_ok() {
        true => Ok(text.to_owned()),
        false => Err("write ADDRESS:PORT, for example 127.0.0.1:7602".to_owned()),
    }
}

/// Checks `node.listen`: `auto` or `ADDRESS:PORT`.
pub(crate) fn parse_node_listen(text: &str) -> Result<String, String> {
    match text == "auto" || text.parse::<SocketAddr>().is_ok() {
        true => Ok(text.to_owned()),
        false => Err("write ADDRESS:PORT, for example 0.0.0.0:7600, or auto".to_owned()),
    }
}

/// Time of day, in the machine's time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TimeOfDay {
    /// Minute of the day, 0 to 1439.
    pub(crate) minute: u16,
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.minute / 60, self.minute % 60)
    }
}

/// Parses a time of day: `22:00`.
pub(crate) fn parse_time_of_day(text: &str) -> Result<TimeOfDay, String> {
    let part = |text: &str, most: u16| {
        let number = text.parse().ok().filter(|&number: &u16| number <= most);
        number.filter(|_| text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit()))
    };
    let minute = text.split_once(':').and_then(|(hour, minute)| {
        let (hour, minute) = (part(hour, 23)?, part(minute, 59)?);
        Some(hour * 60 + minute)
    });
    let minute = minute.ok_or("write hours and minutes, for example 22:00")?;
    Ok(TimeOfDay { minute })
}

/// Parses a number and a unit of time: `90s`, `30m`, `24h`, `7d`. From a second to a year.
pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || "write a number and a unit, for example 30m, 24h or 7d".to_owned();
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let parts = |(unit, s): &(char, u64)| Some((text.strip_suffix(*unit)?, *s));
    let (number, seconds) = units.iter().find_map(parts).ok_or_else(wrong)?;
    if !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let number: u64 = number.parse().map_err(|_| wrong())?;
    match number.checked_mul(seconds) {
        Some(total @ 1..=31_536_000) => Ok(Duration::from_secs(total)),
        _ => Err("take between 1s and 365d".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_an_address_or_a_name_with_a_port() {
        for right in [
            "127.0.0.1:0",
            "[::]:7602",
            "localhost:7602",
            "box-1.home.arpa:80",
        ] {
            assert!(parse_listen(right).is_ok(), "{right}");
        }
        for wrong in [
            "",
            "7602",
            ":7602",
            "localhost",
            "localhost:",
            "localhost:65536",
            "300.1.1.1:80",
            "::1:80",
            "http://localhost:80",
            "a b:80",
            "auto",
        ] {
            assert!(parse_listen(wrong).is_err(), "{wrong}");
        }
        assert!(parse_node_listen("auto").is_ok() && parse_node_listen("localhost:1").is_err());
    }

    #[test]
    fn layer_ranges_are_inclusive_and_must_not_run_backwards() {
        assert_eq!(parse_layers("0-14"), Ok(Layers::Range(0, 14)));
        assert_eq!(parse_layers("7-7"), Ok(Layers::Range(7, 7)));
        assert_eq!(parse_layers("auto"), Ok(Layers::Auto));
        for wrong in ["", "3", "Auto", "8-7", "a-b", "-1-2", "0-99999999999"] {
            assert!(parse_layers(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_time_of_day_has_two_digits_each() {
        for (text, minute) in [("00:00", 0), ("07:05", 425), ("23:59", 1439)] {
            let time = parse_time_of_day(text).unwrap();
            assert_eq!((time.minute, time.to_string().as_str()), (minute, text));
        }
        for wrong in [
            "", "7:00", "24:00", "12:60", "1200", "12:0", "+1:00", "12:00:00", "1é:00",
        ] {
            assert!(parse_time_of_day(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_a_number_and_a_unit_up_to_a_year() {
        for (text, seconds) in [
            ("90s", 90),
            ("30m", 1800),
            ("24h", 86_400),
            ("365d", 31_536_000),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)));
        }
        for wrong in [
            "",
            "s",
            "24",
            "h24",
            "-1h",
            "+1h",
            "1.5h",
            "0s",
            "366d",
            "99999999999999999999d",
            "2w",
            "1é",
        ] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
