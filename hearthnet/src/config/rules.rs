//! Rules of single settings: each reads a value, or refuses it with a text that continues a
//! sentence beginning with the setting's key.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::is_name;
use hearthnet_hub::ModelRef;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::cli::args::{
    EngineKind, Layers, TimeOfDay, parse_device, parse_dtype, parse_layers, parse_listen,
    parse_node_listen, parse_time_of_day,
};

/// Limit of peers that a node connects to.
const MAX_STATIC_PEERS: usize = 64;

/// Whole number from `LEAST` to `MOST`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Within<T, const LEAST: u64, const MOST: u64>(pub(crate) T);

/// Whole number that fits its type.
pub(super) type Whole<T> = Within<T, 0, { u64::MAX }>;

/// Number of seconds, up to a day.
pub(super) type UpToADay = Within<u64, 1, 86_400>;

impl<'de, T, const LEAST: u64, const MOST: u64> Deserialize<'de> for Within<T, LEAST, MOST>
where
    T: TryFrom<u64>,
{
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = u64::deserialize(from)?;
        let text = |n: u64| match n.is_power_of_two() && n >= 1 << 20 {
            true => format!("2^{}", n.ilog2()),
            false => n.to_string(),
        };
        match T::try_from(value) {
            Ok(number) if (LEAST..=MOST).contains(&value) => Ok(Self(number)),
            Err(_) if MOST == u64::MAX => Err(D::Error::custom(format!("is too large: {value}"))),
            _ => Err(D::Error::custom(match (LEAST, MOST) {
                (0, most) => format!("must be at most {}", text(most)),
                (least, u64::MAX) => format!("must be at least {}", text(least)),
                (least, most) => format!("must lie between {} and {}", text(least), text(most)),
            })),
        }
    }
}

pub(super) fn health_timeout<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let seconds = f64::deserialize(from)?;
    match seconds > 0.0 && seconds <= 86_400.0 {
        true => Ok(seconds),
        false => Err(D::Error::custom(
            "must be more than 0 and at most 86400 seconds",
        )),
    }
}

pub(super) fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let share = f64::deserialize(from)?;
    match (0.0..=1.0).contains(&share) {
        true => Ok(share),
        false => Err(D::Error::custom("must lie between 0.0 and 1.0")),
    }
}

/// Text that `parse` accepts.
fn text<'de, D: Deserializer<'de>, T>(
    from: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    let text = String::deserialize(from)?;
    parse(&text).map_err(D::Error::custom)
}

/// Text that a type reads itself, with an error for people.
pub(super) fn parsed<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = String>,
{
    text(from, str::parse)
}

/// Text for which `holds` is true; else the error is `why`.
fn text_that<'de, D: Deserializer<'de>>(
    from: D,
    why: &str,
    holds: impl FnOnce(&str) -> bool,
) -> Result<String, D::Error> {
    text(from, |text| match holds(text) {
        true => Ok(text.to_owned()),
        false => Err(why.to_owned()),
    })
}

pub(super) fn backend<'de, D: Deserializer<'de>>(from: D) -> Result<EngineKind, D::Error> {
    let why = "must be \"small_model_layered\", HearthNet's own engine, or \"torch\"; \
               \"petals_like\" is not implemented";
    text(from, |name| match name {
        "small_model_layered" => Ok(EngineKind::Exact),
        "torch" => Ok(EngineKind::Torch),
        _ => Err(why.to_owned()),
    })
}

pub(super) fn device<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(from, |name| {
        parse_device(name).map_err(|why| format!("is not a device: {why}"))
    })
}

pub(super) fn dtype<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(from, |name| {
        parse_dtype(name).map_err(|why| format!("is not a format: {why}"))
    })
}

pub(super) fn layers<'de, D: Deserializer<'de>>(from: D) -> Result<Layers, D::Error> {
    text(from, |range| {
        parse_layers(range).map_err(|why| format!("is not a range: {why}"))
    })
}

pub(super) fn activation_dtype<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let why = "must be \"fp16\" (as the model's file says), or \"fp32\" for debugging";
    text_that(from, why, |name| ["fp16", "fp32"].contains(&name))
}

/// Hours of each day, in the machine's time zone. They may pass midnight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct QuietHours {
    pub(crate) from: TimeOfDay,
    pub(crate) until: TimeOfDay,
}

impl QuietHours {
    /// Whether a minute of the day belongs to them.
    pub(crate) fn contain(&self, minute: u16) -> bool {
        let (from, until) = (self.from.minute, self.until.minute);
        match from < until {
            true => (from..until).contains(&minute),
            false => minute >= from || minute < until,
        }
    }
}

impl fmt::Display for QuietHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.from, self.until)
    }
}

/// Parses hours of the day, `22:00-07:00`; an empty text is none.
pub(crate) fn parse_quiet_hours(hours: &str) -> Result<Option<QuietHours>, String> {
    let form = "must be two times of day, for example \"22:00-07:00\", or \"\"";
    if hours.is_empty() {
        return Ok(None);
    }
    let (from, until) = hours.split_once('-').ok_or(form)?;
    let time = |text: &str| parse_time_of_day(text.trim()).map_err(|_| form.to_owned());
    let (from, until) = (time(from)?, time(until)?);
    match from == until {
        true => Err(form.to_owned()),
        false => Ok(Some(QuietHours { from, until })),
    }
}

pub(super) fn quiet_hours<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<QuietHours>, D::Error> {
    text(from, parse_quiet_hours)
}

/// Name of a model, or nothing.
pub(super) fn model<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ModelRef>, D::Error> {
    text(from, |name| match name {
        "" => Ok(None),
        name => name
            .parse::<ModelRef>()
            .map(Some)
            .map_err(|why| format!("names no model: {why}")),
    })
}

/// Name of a node, or nothing.
pub(super) fn node_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let why = "must be at most 64 bytes, without invisible characters";
    text_that(from, why, |name| name.is_empty() || is_name(name))
}

pub(super) fn node_listen<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let why = "must be \"auto\" or ADDRESS:PORT, for example \"0.0.0.0:7600\"";
    text_that(from, why, |text| parse_node_listen(text).is_ok())
}

const LISTEN: &str = "must be ADDRESS:PORT, for example \"127.0.0.1:7602\"";

pub(super) fn listen<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text_that(from, LISTEN, |text| parse_listen(text).is_ok())
}

/// Address to listen on, or nothing.
pub(super) fn listen_or_none<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text_that(from, LISTEN, |text| {
        text.is_empty() || parse_listen(text).is_ok()
    })
}

/// List of texts for each of which `holds` is true; else the error is `why`.
fn texts_that<'de, D: Deserializer<'de>>(
    from: D,
    why: &str,
    holds: impl Fn(&str) -> bool,
) -> Result<Vec<String>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    match texts.iter().all(|text| holds(text)) {
        true => Ok(texts),
        false => Err(D::Error::custom(why)),
    }
}

/// Names that `Host` may have.
pub(super) fn allowed_hosts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let why = "must list host names without ports, for example \"host.docker.internal\"";
    texts_that(from, why, |name| {
        let fits = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        (1..=253).contains(&name.len()) && name.bytes().all(fits)
    })
}

/// Origins as browsers send them: a scheme, a host, and a port if it is not the scheme's own.
pub(super) fn cors_origins<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let why =
        "must list origins without paths, in lower case, for example \"http://localhost:3000\"";
    texts_that(from, why, |origin| {
        let fits = |b: u8| b.is_ascii_graphic() && !b.is_ascii_uppercase() && !b"/*".contains(&b);
        origin.split_once("://").is_some_and(|(scheme, host)| {
            [scheme, host]
                .iter()
                .all(|part| !part.is_empty() && part.bytes().all(fits))
        })
    })
}

/// Ids of models by other names.
pub(super) fn aliases<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    let form = "must map names to ids of models, for example { \"gpt-4o-mini\" = \"smollm2-135m-instruct\" }";
    // Any text would do; these limits only catch mistakes.
    let fits =
        |name: &String| (1..=200).contains(&name.len()) && !name.contains(char::is_whitespace);
    let table = toml::Table::deserialize(from)?.into_iter();
    let aliases = table.map(|(alias, id)| Some((alias, id.as_str()?.to_owned())));
    let aliases: Option<BTreeMap<_, _>> = aliases.collect();
    let valid = aliases.filter(|all| all.iter().all(|(alias, id)| fits(alias) && fits(id)));
    valid.ok_or_else(|| D::Error::custom(form))
}

pub(super) fn static_peers<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<StaticPeer>, D::Error> {
    let peers = Vec::<String>::deserialize(from)?;
    if peers.len() > MAX_STATIC_PEERS {
        return Err(D::Error::custom("must name at most 64 peers"));
    }
    let form = "must list HOST:PORT or HOST:PORT#NODEID, for example \"192.168.1.20:7600\"";
    let parsed = peers.iter().map(|peer| peer.parse::<StaticPeer>());
    parsed
        .collect::<Result<Vec<_>, _>>()
        .map_err(|why| D::Error::custom(format!("{form}; {why}")))
}
