//! Timing report of an answer.

use std::fmt::Write as _;

use hearthnet_orchestrator::chat::{Done, Frame};

use crate::cli::{bytes, table};

/// Characters of a node id in a line: `ed25519:` and eight more.
const SHORT_ID: usize = 16;

/// Report of the route with its times, and of failovers (`moves`).
pub(crate) fn explain(done: &Done, moves: &[Frame]) -> String {
    let t = &done.timings;
    let rows = done.route.iter().zip(&t.hops).map(|(hop, times)| {
        let milli = |us: u32| match times.steps {
            0 => "-".to_owned(),
            _ => format!("{:.3}", f64::from(us) / 1e3),
        };
        [
            match (&hop.endpoint, &hop.host) {
                (Some(at), Some(host)) => format!("{at} ({})", short(host)),
                _ => "this machine".to_owned(),
            },
            format!("{}-{}", hop.layers.0, hop.layers.1),
            bytes(hop.memory_mb << 20),
            times.steps.to_string(),
            milli(times.compute_us_p50),
            milli(times.queue_us_p50),
            milli(times.overhead_us_p50),
            milli(times.overhead_us_p95),
        ]
    });
    let header = "host|layers|memory|tokens|compute ms|queue ms|wire ms p50|p95";
    let mut out = format!("\n{}", table(header, rows));
    out.push_str("  per token; wire: the rest of the round trip, with its time in queues\n");
    if let Some(hop) = done.route.iter().find(|hop| !hop.policy.is_empty()) {
        let _ = writeln!(out, "  hosts chosen by routing policy {}", hop.policy);
    }
    if let Some(host) = done.route.last().and_then(|last| last.host.as_ref()) {
        let host = short(host);
        let _ = writeln!(
            out,
            "  the last layers, which choose the words, ran at {host}: --private-last N runs N of them here"
        );
    }
    for frame in moves {
        if let Frame::ShardFailover {
            shard_id,
            host,
            code,
            replacements,
            replayed,
            recovery_ms,
            arithmetic,
        } = frame
        {
            let layers = shard_id.rsplit(':').next().unwrap_or(shard_id);
            let from = host
                .as_ref()
                .map_or_else(String::new, |host| format!(" from {}", short(host)));
            let to: Vec<String> = replacements.iter().map(|host| short(host)).collect();
            let to = match to.is_empty() {
                true => "this machine".to_owned(),
                false => to.join(" and "),
            };
            let _ = writeln!(
                out,
                "  layers {layers} moved{from} to {to} in {recovery_ms:.0} ms, {replayed} positions again: {code}"
            );
            if let Some((before, now)) = arithmetic {
                let _ = writeln!(
                    out,
                    "    computed with {before} before, with {now} from there on"
                );
            }
        }
    }
    let _ = writeln!(
        out,
        "  computed with {}: {}",
        done.arithmetic,
        match done.arithmetic.is_exact() {
            true => "the same question has the same answer, however the layers are spread",
            false => "not exact, the same question may have another answer",
        }
    );
    let seed = done
        .seed
        .map_or_else(|| "none".to_owned(), |seed| seed.to_string());
    let _ = write!(
        out,
        "  ready after {:.0} ms; {} prompt tokens ({} cached) in {:.0} ms, first token after {:.0} ms, then {:.1} tokens/s;\n  {:.2} ms per token for embedding, output and sampling here; seed {seed}",
        t.construct_ms,
        done.usage.prompt_tokens,
        done.usage.cached_tokens,
        t.prefill_ms,
        t.first_token_ms,
        t.tokens_per_second,
        t.head_ms_per_token,
    );
    out
}

fn short(node: &str) -> String {
    node.chars().take(SHORT_ID).collect()
}
