//! Catalogue of the cases that the suite covers, each with one attack.

/// Case of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Number in the catalogue, from 1.
    pub number: u8,
    /// Heading of the case in the report.
    pub group: &'static str,
    /// Action of the attacker.
    pub attack: &'static str,
    /// Code that the victim must raise or count.
    pub code: &'static str,
}

macro_rules! cases {
    ($($group:literal { $($number:literal $attack:literal $code:literal,)* })*) => {
        /// Every case, by ascending number.
        pub const CASES: &[Case] = &[
            $($(Case { number: $number, group: $group, attack: $attack, code: $code },)*)*
        ];
    };
}

cases! {
    "framing" {
        1 "payload length disagrees with the message" "frame_length",
        2 "declares 16 MiB, sends nothing" "frame_too_big",
        3 "unknown version, type, flag; non-zero reserved" "frame_unknown",
        4 "a valid type in the wrong state" "protocol_state",
        5 "sequence gap, duplicate, wrap" "frame_sequence",
        6 "a million WebSocket fragments, empty frames" "frame_rate",
        7 "text message, reserved bits, unmasked client frames" "websocket",
    }
    "flow control" {
        8 "a 17th chunk without credit" "credit_overrun",
        9 "grants of u32::MAX, twice" "credit_overflow",
        10 "ACK of what was never sent" "credit_ack",
        11 "credit withheld" "credit_stall",
        12 "an oversized first frame of a stream" "frame_too_big",
        13 "open/cancel churn" "stream_churn",
        14 "thousands of 1-byte chunks" "chunk_too_small",
    }
    "identity" {
        15 "valid key, not a member" "unauthorized",
        16 "A expected, B answers" "identity_mismatch",
        17 "HELLO relayed over another node's channel" "token_subject",
        18 "session token replayed, at the same or another node" "token_replayed",
        19 "expired token, skewed clock" "token_expired",
        20 "small-order key, malleable signature" "invalid_signature",
        21 "a revoked key reconnects, or keeps an open session" "revoked",
    }
    "event log" {
        22 "forged author" "invalid_signature",
        23 "one author, same position, two bodies" "log_fork",
        24 "replay of an old descriptor" "log_stale",
        25 "timestamp ten years ahead" "log_time",
        26 "a flood of a million events" "log_quota",
        27 "torn or bit-flipped tail after kill -9" "log_recovered",
    }
    "routing" {
        28 "an inverted layer range, a range beyond the model, overflow" "bad_descriptor",
        29 "same range, other weights, quantisation or RoPE" "weights_mismatch",
        30 "claims every layer at no load" "route_share",
        31 "10,000 Sybil descriptors" "route_budget",
        32 "late answer of a replaced shard" "stale_epoch",
    }
    "tensor content" {
        33 "NaN, Inf" "tensor_nonfinite",
        34 "rows x dim overflow, zero dims, wrong dtype" "tensor_shape",
        35 "rows of zeros, of the input or of an earlier step, norm x 100" "tensor_band",
        36 "in-band steering vector" "audit_mismatch",
        37 "4-bit weights posing as the full ones" "audit_mismatch",
        38 "honest fp16 overflow (control)" "boundary_overflow",
    }
    "time, resources, privacy" {
        39 "slowloris at TCP, TLS, upgrade, HELLO, mid-tensor" "pipeline_stalled",
        40 "a host that is fast at first and then slow on purpose" "degraded",
        41 "zstd bomb, wrong size, legacy magic" "decompression",
        42 "10,000 half-open connections, ping flood" "connection_limit",
        43 "streams opened and abandoned" "stream_limit",
        44 "a canary prompt searched for in logs, wire, files, core dumps" "no hits",
        45 "many streams that fill the KV memory and starve others" "preempted",
        46 "a host looks its received rows up in the embedding table" "no hits",
    }
    "access control" {
        47 "a demoted anchor back-dates admissions, revocations and policies" "no effect",
        48 "a revoked member joins again by the same code with another key" "no effect",
        49 "a Lamport time at the limit, which all nodes would adopt" "no effect",
        50 "a clock a day ahead, which would cut its owner off" "log_time",
        51 "a member that announces addresses on others' machines" "no effect",
        52 "a crowd of made-up nodes with one code" "busy",
        53 "events that sort before all others, sent one by one" "no effect",
    }
    "strangers and neighbours" {
        54 "silent connections from four addresses of the home's network" "connection_limit",
        55 "strangers hold all sockets for calls while there is an invite" "session_limit",
        56 "strangers use up a node's budget for strangers" "no effect",
        57 "one member takes all sessions and streams of a host" "preempted",
        58 "neighbours that take all streams of a host from its owner" "preempted",
    }
    "membership and host names" {
        59 "a host that ignores its revocation or demotion" "no effect",
        60 "a web page whose host name resolves to this machine (DNS rebinding)" "forbidden_host",
        61 "back-dated events of a demoted member and of a member in good standing" "no effect",
        62 "a log that ends before a revocation, fed to a joiner" "no effect",
        63 "a holder of the root key that is not a member" "no effect",
        64 "one root key used in two disconnected places" "no effect",
        65 "an outdated copy of an anchor's data, used once" "no effect",
        66 "a member that invites members of its own making" "no effect",
    }
    "rows between hosts" {
        67 "prompt rows returned in another order" "tensor_band",
        68 "one prompt row returned in place of others" "tensor_band",
    }
    "hostile files" {
        70 "a file passed on with genuine weights and another template" "no effect",
        71 "a chat template that needs unlimited time or memory" "no effect",
        72 "a forged hash record beside false weights" "no effect",
        73 "another template or tokenizer with the genuine weights" "no effect",
    }
    "neighbours and other users" {
        74 "neighbours fill the slots and the queue of a service" "no effect",
        75 "another local user repeats the owner's prompts and requests long answers" "no effect",
        76 "hundreds of HTTP requests with unfinished heads" "no effect",
        77 "silent connections to the local API" "no effect",
    }
    "untrusted text" {
        78 "escape sequences, reversed writing and forged lines in shown text" "no effect",
    }
    "compromised daemon" {
        79 "code in a daemon attacks its user's files, programs and processes" "no effect",
    }
    "calls" {
        80 "a member and a crowd that it invited fill the replay cache of calls" "rate_limited",
    }
    "untrusted text in output" {
        81 "a host's name and texts that forge lines of a daemon's log" "no effect",
        82 "control characters in member names, models and flight records" "no effect",
        83 "names and texts that a browser would run" "no effect",
    }
    "sockets of a node" {
        84 "a crowd that a member invited holds all sockets for calls and for gossip" "session_limit",
    }
    "none (control)" {
        85 "two neighbours who chat, each within its share (control)" "no effect",
    }
    "streams of a host" {
        86 "streams opened as fast as one session may, in session after session" "stream_churn",
        87 "steps of eight rows on all streams that a caller may have" "no effect",
    }
    "disputes" {
        88 "a caller, its crowd and its hosts slander an honest host" "no effect",
        89 "an auditing host returns a wrong row and leaves, so that another host finishes" "no effect",
        90 "an auditing host is wrong in a row that its claim at the same end leaves out" "no effect",
    }
}

impl Case {
    pub fn find(number: u8) -> Option<&'static Case> {
        CASES.iter().find(|case| case.number == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_numbers_are_unique_and_ascending() {
        assert!(CASES.is_sorted_by(|earlier, later| earlier.number < later.number));
        assert_eq!(Case::find(44).map(|case| case.code), Some("no hits"));
        assert_eq!(Case::find(0), None);
    }
}
