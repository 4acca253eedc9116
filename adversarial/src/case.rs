//! The cases that the suite is to hold against: one line per case, whether or not its attack is
//! built. What has no attack yet is reported as such, so that the report never claims more than
//! was done.

/// A case of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Number in the catalogue, from 1.
    pub number: u8,
    /// What it belongs to.
    pub group: &'static str,
    /// What the attacker does.
    pub attack: &'static str,
    /// The code that must be raised or counted.
    pub code: &'static str,
}

macro_rules! cases {
    ($($group:literal { $($number:literal $attack:literal $code:literal,)* })*) => {
        /// Every case, in the order of their numbers.
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
        28 "lo > hi, hi beyond the model, overflow" "bad_descriptor",
        29 "same range, other weights, quantisation or RoPE" "weights_mismatch",
        30 "claims every layer at no load" "route_share",
        31 "10,000 Sybil descriptors" "route_budget",
        32 "late answer of a replaced shard" "stale_epoch",
    }
    "tensor content" {
        33 "NaN, Inf" "tensor_nonfinite",
        34 "rows x dim overflow, zero dims, wrong dtype" "tensor_shape",
        35 "zeros, identity, yesterday's output again, norm x 100" "tensor_band",
        36 "in-band steering vector" "audit_mismatch",
        37 "4-bit weights posing as the full ones" "audit_mismatch",
        38 "honest overflow of fp16 (control)" "boundary_overflow",
    }
    "time, resources, privacy" {
        39 "slowloris at TCP, TLS, upgrade, HELLO, mid-tensor" "pipeline_stalled",
        40 "good, then slow only under load" "degraded",
        41 "zstd bomb, wrong size, legacy magic" "decompression",
        42 "10,000 half-open connections, ping flood" "connection_limit",
        43 "streams opened and abandoned" "stream_limit",
        44 "a canary prompt searched for in logs, wire, files, core dumps" "no hits",
        45 "many streams that fill the KV memory, so that others starve" "preempted",
        46 "a host looks up what it is sent in the embedding table" "no hits",
    }
    "rights" {
        47 "a demoted anchor admits, revokes and rules in the past" "no effect",
        48 "a revoked member comes back by the same code with another key" "no effect",
        49 "a Lamport time at the limit, which everybody would follow" "no effect",
        50 "a clock a day ahead, which would cut its owner off" "log_time",
        51 "a member that says it listens on others' own machines" "no effect",
        52 "a crowd of made-up nodes with one code" "busy",
        53 "events sent one by one that sort before all others" "no effect",
    }
    "strangers and neighbours" {
        54 "silent connections from four addresses of the home's network" "connection_limit",
        55 "strangers hold all sockets for calls while there is an invite" "session_limit",
        56 "strangers use up what a node has to spare for strangers" "no effect",
        57 "one member takes all sessions and streams of a host" "preempted",
        58 "neighbours keep all streams of a host from its owner" "preempted",
    }
    "rights and names" {
        59 "a host that is put out or demoted and does not care" "no effect",
        60 "a web page whose name resolves to this machine" "forbidden_host",
        61 "events that are dated back, by one who lost a level and by one who did not" "no effect",
        62 "a log that ends before a revocation, fed to a joiner" "no effect",
        63 "whoever has the root key, and is no member" "no effect",
        64 "one root key used in two places that do not hear of each other" "no effect",
        65 "an old copy of an anchor's data, used once" "no effect",
        66 "a member whose invites make up more members" "no effect",
    }
    "rows between hosts" {
        67 "rows of a prompt in each other's places" "tensor_band",
        68 "one row of a prompt for others as well" "tensor_band",
    }
    "hostile files" {
        70 "a file that is passed on with another template and the genuine weights" "no effect",
        71 "a chat template that wants all time or memory" "no effect",
        72 "a record beside other weights says that they are the genuine ones" "no effect",
        73 "another template or tokenizer beside the genuine weights" "no effect",
    }
    "neighbours and other users" {
        74 "neighbours fill a service's places and its queue" "no effect",
        75 "another user of the machine asks what its owner asked, and for long answers" "no effect",
        76 "hundreds of requests over HTTP whose heads have no end" "no effect",
        77 "silent connections to the local API" "no effect",
    }
    "words of others" {
        78 "escape sequences, turned writing and forged lines in what is shown" "no effect",
    }
    "a daemon that is taken over" {
        79 "whoever runs inside a daemon goes for its user's files, programs and processes" "no effect",
    }
    "calls" {
        80 "a member and a crowd that it let in fill what is remembered of calls" "rate_limited",
    }
    "words of others, where they come out" {
        81 "a host's name and words that forge lines of the log of a daemon" "no effect",
        82 "members' names, models and records that steer what status and diagnose show" "no effect",
        83 "names and words that a browser would run" "no effect",
    }
    "sockets of a node" {
        84 "a crowd that a member let in holds all sockets for calls and for gossip" "session_limit",
    }
    "none (control)" {
        85 "two neighbours who chat, each within its share (control)" "no effect",
    }
    "places of a host" {
        86 "streams opened as fast as one session may, in session after session" "stream_churn",
        87 "steps of eight rows on all the streams that one caller may have" "no effect",
    }
}

impl Case {
    /// The case with this number.
    pub fn find(number: u8) -> Option<&'static Case> {
        CASES.iter().find(|case| case.number == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_the_catalogue_stands_once_and_in_order() {
        assert!(CASES.is_sorted_by(|earlier, later| earlier.number < later.number));
        assert_eq!(Case::find(44).map(|case| case.code), Some("no hits"));
        assert_eq!(Case::find(0), None);
    }
}
