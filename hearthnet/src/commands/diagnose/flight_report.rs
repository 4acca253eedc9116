//! Timeline of several nodes' flight records, as text and as JSON.
//!
//! All input may come from another node. Records hold no texts but names of printable ASCII
//! (`hearthnet_bus::flight`), and reasons of failed calls are sanitized. Names of nodes are
//! sanitized here.

use std::fmt::Write as _;

use hearthnet_bus::NodeId;
use hearthnet_bus::calls::CallError;
use hearthnet_bus::flight::{Answer, Entry, Event};
use hearthnet_bus::log::Community;
use hearthnet_text::sanitize;
use serde_json::{Value, json};

use crate::cli::{bytes, table, when};
use crate::home::now_ms;

/// Node that was asked, and its answer or error.
pub(crate) struct Asked {
    pub(crate) node: NodeId,
    /// Whether it runs on the data directory of this machine.
    pub(crate) here: bool,
    pub(crate) answer: Result<Answer, CallError>,
}

/// Length of a pipeline's id in a line: its last characters, which are random.
const SHORT_ID: usize = 6;

/// Name of a node.
fn name(who: &NodeId, state: Option<&Community>) -> String {
    let label = state.map(|state| state.label(who, now_ms()));
    sanitize(&label.unwrap_or_else(|| who.short())).into_owned()
}

/// Timeline as text.
pub(crate) fn as_text(nodes: &[Asked], line: &[Entry], state: Option<&Community>) -> String {
    let mut out = String::new();
    let rows = nodes.iter().filter_map(|asked| {
        let answer = asked.answer.as_ref().ok()?;
        let clock = answer.clock();
        let (forgotten, unreadable) = (answer.page.forgotten, answer.unreadable);
        let remarks = [
            (asked.here, "this node".to_owned()),
            (
                forgotten > 0,
                format!("{forgotten} older events were dropped"),
            ),
            (
                answer.page.partial,
                "it reports only events of this node".to_owned(),
            ),
            (answer.cut, "it has more events than the limit".to_owned()),
            (unreadable > 0, format!("{unreadable} cannot be read")),
        ];
        let remarks = remarks.into_iter().filter(|(applies, _)| *applies);
        let remarks: Vec<String> = remarks.map(|(_, remark)| remark).collect();
        Some([
            name(&asked.node, state),
            answer.page.records.len().to_string(),
            ahead(clock.ahead_ms),
            milliseconds(clock.give_or_take_us),
            remarks.join(", "),
        ])
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        out.push_str(&table("node|events|its clock|give or take|", rows));
    }
    for asked in nodes {
        if let Err(error) = &asked.answer {
            let (name, code) = (name(&asked.node, state), error.code());
            let _ = writeln!(out, "  {name}  no answer: {code}: {error}");
        }
    }
    if line.is_empty() {
        out.push_str("\nno events in this time\n");
        return out;
    }
    let width = line
        .iter()
        .map(|entry| name(&entry.node, state).chars().count());
    let width = width.max().unwrap_or(0);
    let mut day = String::new();
    for entry in line {
        let moment = moment(entry.at_us);
        let (date, time) = moment.split_once(' ').unwrap_or(("", &moment));
        if date != day {
            let _ = writeln!(out, "\n{date}, UTC by this machine's clock");
            day = date.to_owned();
        }
        let node = name(&entry.node, state);
        let id = entry.pipeline.map_or_else(String::new, |id| id.to_string());
        let id = id
            .get(id.len().saturating_sub(SHORT_ID)..)
            .unwrap_or_default();
        let _ = write!(
            out,
            "{time} {:>8}  {node:width$}  {id:SHORT_ID$}  {}",
            format!("±{}", milliseconds(entry.give_or_take_us)),
            words(&entry.record.event, state)
        );
        if entry.record.times > 1 {
            let _ = write!(out, " ({} times)", entry.record.times);
        }
        if entry.doubtful {
            out.push_str(" (its time cannot be right)");
        }
        out.push('\n');
    }
    out
}

/// Timeline as JSON.
pub(crate) fn as_json(nodes: &[Asked], line: &[Entry], state: Option<&Community>) -> Value {
    let node = |asked: &Asked| match &asked.answer {
        Ok(answer) => {
            let clock = answer.clock();
            json!({
                "node": asked.node, "name": name(&asked.node, state), "here": asked.here,
                "records": answer.page.records.len(), "forgotten": answer.page.forgotten,
                "unreadable": answer.unreadable, "cut": answer.cut,
                "partial": answer.page.partial,
                "clock_ahead_ms": clock.ahead_ms,
                "give_or_take_ms": clock.give_or_take_us as f64 / 1e3,
            })
        }
        Err(error) => json!({
            "node": asked.node, "name": name(&asked.node, state), "here": asked.here,
            "error": {"code": error.code().as_str(), "message": error.message()},
        }),
    };
    let event = |entry: &Entry| {
        json!({
            "unix_ms": entry.at_us as f64 / 1e3,
            "give_or_take_ms": entry.give_or_take_us as f64 / 1e3,
            "doubtful": entry.doubtful,
            "node": entry.node,
            "pipeline": entry.pipeline,
            "times": entry.record.times,
            "event": entry.record.event,
        })
    };
    let nodes: Vec<Value> = nodes.iter().map(node).collect();
    let events: Vec<Value> = line.iter().map(event).collect();
    json!({"nodes": nodes, "events": events})
}

fn ahead(ms: i64) -> String {
    match ms {
        -1..=1 => "right".to_owned(),
        2.. => format!("{ms} ms ahead"),
        _ => format!("{} ms behind", ms.unsigned_abs()),
    }
}

fn milliseconds(us: u64) -> String {
    format!("{:.1}ms", us as f64 / 1e3)
}

/// Formats a time as `2026-11-21 06:40:04.123`, or as a number beyond the year 9999.
fn moment(unix_us: u64) -> String {
    let whole = when(unix_us / 1000);
    match whole.strip_suffix(" UTC") {
        Some(seconds) => format!("{seconds}.{:03}", unix_us / 1000 % 1000),
        None => whole,
    }
}

/// Sentence about an event, without its subject, the node.
fn words(event: &Event, state: Option<&Community>) -> String {
    let fields = serde_json::to_value(event).unwrap_or_default();
    let said = |field: &str| match (field, &fields[field]) {
        ("host" | "peer", Value::String(id)) => id
            .parse()
            .map_or_else(|_| id.clone(), |id| name(&id, state)),
        ("bytes", size) => bytes(size.as_u64().unwrap_or_default()),
        ("by_us", by_us) => match by_us.as_bool() {
            Some(true) => "this side".to_owned(),
            _ => "the caller".to_owned(),
        },
        ("layers", range) => format!("{}-{}", range[0], range[1]),
        ("replacements", hosts) => match hosts.as_u64() {
            Some(0) => "this machine".to_owned(),
            Some(1) => "another host".to_owned(),
            _ => format!("{hosts} hosts"),
        },
        (_, Value::String(text)) => text.clone(),
        (_, value) => value.to_string(),
    };
    let mut words = String::new();
    for (at, part) in sentence(event).split(['{', '}']).enumerate() {
        match at % 2 {
            0 => words.push_str(part),
            _ => words.push_str(&said(part)),
        }
    }
    words
}

/// Template of a kind of event, with its fields as `{field}`.
fn sentence(event: &Event) -> &'static str {
    match event {
        Event::PipelineBuilt { hosts: 0, .. } => "computes alone, ready in {ms} ms",
        Event::PipelineBuilt { .. } => "has a pipeline over {hosts} hosts in {ms} ms",
        Event::StreamAsked { .. } => {
            "asks {host} for {shard}, stream {stream}.{epoch} of session {session}"
        }
        Event::StreamReady { .. } => "has stream {stream}.{epoch} at {host}",
        Event::HostFailed { .. } => "loses {shard} at {host}: {code}",
        Event::HostPreempted { .. } => "gives up {shard} at {host} for a while: no memory there",
        Event::FailedOver { host: None, .. } => {
            "moved {shard} to {replacements} in {ms} ms, {replayed} positions again: {code}"
        }
        Event::FailedOver { .. } => {
            "moved {shard} from {host} to {replacements} in {ms} ms, \
             {replayed} positions again: {code}"
        }
        Event::StaleAnswer { .. } => "drops a late answer of {host}",
        Event::HostLeaving { .. } => "learns that {host} leaves within {within_ms} ms",
        Event::Answered { .. } => {
            "answered: {prompt_tokens} tokens of prompt ({cached_tokens} cached), \
             {completion_tokens} of answer, {ms} ms"
        }
        Event::Aborted { .. } => "ends unfinished: {code}",
        Event::Cancelled { .. } => "was cancelled",
        Event::PipelineEnded { .. } => "closes its streams",
        Event::ShardServing { .. } => "serves {shard}",
        Event::ShardLeaving { .. } => {
            "leaves {shard} within {within_ms} ms, {streams} streams open"
        }
        Event::ShardStopped { .. } => "stopped serving {shard}, {cut} streams cut off",
        Event::WeightsLoaded { .. } => "has {bytes} of weights in memory",
        Event::WeightsEvicted {} => "unloaded its weights",
        Event::SessionBegan { .. } => "session {session} of {peer} begins ({purpose})",
        Event::SessionEnded { .. } => "session {session} of {peer} is over, by {by_us}: {code}",
        Event::StreamOpened { .. } => "opened stream {stream}.{epoch} for {peer}, layers {layers}",
        Event::StreamRefused { .. } => "refused stream {stream}.{epoch} of {peer}: {code}",
        Event::StreamEnded { .. } => {
            "ended stream {stream}.{epoch} of {peer}: {code}, {rows} rows in {steps} steps"
        }
        Event::NodeStarted {} => "runs",
        Event::PeerConnected { .. } => "is linked with {peer}",
        Event::PeerLost { .. } => "lost the link with {peer}: {code}",
        Event::PeerUnreachable { .. } => "cannot reach {peer}: {code}",
        Event::PeerRefused { .. } => "refused {peer}: {code}",
        Event::AdvertSeen { .. } => "sees {peer} offer {shard}",
        Event::AdvertGone { .. } => "no longer sees {peer} offer {shard}: {code}",
        Event::Revoked { .. } => "learns that {peer} was revoked",
        Event::ConnectionRefused { .. } => "had a connection that failed: {code}",
        _ => "reports an unknown kind of event",
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_text::is_plain;

    use super::*;

    #[test]
    fn a_hostile_answer_forges_no_lines() {
        use hearthnet_bus::flight::{Page, Record, Stamp, merge};
        const KEY: &str = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        let evil = "\u{1b}]0;owned\u{7}\r\n\u{202e}10:00:00.000 honest answered";
        let records = [
            json!({"seq": 1, "at": {"unix_ms": u64::MAX, "mono_us": u64::MAX}, "times": u32::MAX,
                "event": {"kind": "host_failed", "pipeline": "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
                    "host": KEY, "shard": evil, "code": evil}}),
            json!({"seq": 2, "at": {"unix_ms": 0, "mono_us": 0},
                "event": {"kind": evil, "more": [evil]}}),
            json!({"seq": 3, "at": {"unix_ms": 5, "mono_us": 5},
                "event": {"kind": "answered", "pipeline": "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
                    "prompt_tokens": u32::MAX, "cached_tokens": u32::MAX,
                    "completion_tokens": u32::MAX, "ms": u64::MAX}}),
        ];
        let records: Vec<Record> = records
            .into_iter()
            .map(|record| serde_json::from_value(record).unwrap())
            .collect();
        let clock = |unix_ms, mono_us| Stamp { unix_ms, mono_us };
        let node: NodeId = KEY.parse().unwrap();
        let answer = Answer {
            asked: clock(1_750_000_000_000, 1_000_000),
            heard: clock(1_750_000_000_005, 1_005_000),
            page: Page {
                run: 7,
                began: clock(0, 20),
                now: clock(u64::MAX, 10),
                forgotten: u64::MAX,
                partial: true,
                next: None,
                records,
            },
            unreadable: u64::MAX,
            cut: true,
        };
        let line = merge(&[(node, answer.clone())]);
        let nodes = [
            Asked {
                node,
                here: false,
                answer: Ok(answer),
            },
            Asked {
                node,
                here: false,
                answer: Err(CallError::new(hearthnet_bus::calls::Code::TIMEOUT, evil)),
            },
        ];
        let shown = as_text(&nodes, &line, None);
        let json = as_json(&nodes, &line, None).to_string();
        for c in shown.chars().filter(|c| *c != '\n') {
            assert!(is_plain(c), "{shown:?}");
        }
        assert!(json.is_ascii(), "{json}");
        // A table of one node, one that was not asked, a date, and an event a line.
        assert_eq!(shown.lines().count(), 2 + 1 + 2 + 3, "{shown}");
        assert!(
            shown.contains("2025-06-15") && !shown.contains("3000"),
            "{shown}"
        );
    }

    #[test]
    fn a_moment_shows_milliseconds_and_a_clock_its_direction() {
        assert_eq!(moment(1_800_000_000_123_456), "2027-01-15 08:00:00.123");
        assert_eq!(moment(u64::MAX), format!("{} ms", u64::MAX / 1000));
        assert_eq!(ahead(0), "right");
        assert_eq!(ahead(-7_200_000), "7200000 ms behind");
        assert_eq!(ahead(i64::MAX), format!("{} ms ahead", i64::MAX));
    }

    #[test]
    fn every_field_that_a_sentence_names_is_one_of_the_event() {
        const KEY: &str = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        const ID: &str = "7ZZZZZZZZZZZZZZZZZZZZZZZZZ";
        let kinds = "pipeline_built stream_asked stream_ready host_failed host_preempted \
            failed_over stale_answer host_leaving answered aborted cancelled pipeline_ended \
            shard_serving shard_leaving shard_stopped weights_loaded weights_evicted \
            session_began session_ended stream_opened stream_refused stream_ended node_started \
            peer_connected peer_lost peer_unreachable peer_refused advert_seen advert_gone \
            revoked connection_refused";
        for kind in kinds.split_whitespace() {
            let event = json!({
                "kind": kind, "pipeline": ID, "host": KEY, "peer": KEY, "session": "0123456789abcdef",
                "shard": "tiny:0-3", "code": "timeout", "purpose": "pipeline", "hosts": 2,
                "ms": 3, "within_ms": 4, "stream": 5, "epoch": 6, "layers": [0, 3],
                "replacements": 1, "replayed": 7, "prompt_tokens": 8, "cached_tokens": 9,
                "completion_tokens": 10, "streams": 11, "cut": 12, "bytes": 13, "by_us": true,
                "steps": 14, "rows": 15,
            });
            let event: Event = serde_json::from_value(event).unwrap();
            let words = words(&event, None);
            assert!(!words.contains("null"), "{kind}: {words}");
            assert!(!words.contains("unknown kind"), "{kind}: {words}");
        }
        let moved = json!({"kind": "failed_over", "pipeline": ID, "host": KEY, "code": "timeout",
            "shard": "tiny:0-3", "replacements": 1, "replayed": 7, "ms": 3});
        let moved: Event = serde_json::from_value(moved).unwrap();
        let node: NodeId = KEY.parse().unwrap();
        assert_eq!(
            words(&moved, None),
            format!(
                "moved tiny:0-3 from {} to another host in 3 ms, 7 positions again: timeout",
                node.short()
            )
        );
    }
}
