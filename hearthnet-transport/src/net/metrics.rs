//! Metrics of the transport, for the recorder of the `metrics` crate that the program installs:
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `hearthnet_transport_sessions` | gauge | `side` |
//! | `hearthnet_transport_sockets` | gauge | `side`, `path` |
//! | `hearthnet_transport_closed_total` | counter | `side`, `path`, `by` = us, peer; `code` |
//! | `hearthnet_transport_bytes_total` | counter | `side`, `direction` = in, out |
//! | `hearthnet_transport_credit_chunks` | gauge | `side`, `state` = granted, used |
//! | `hearthnet_transport_step_slots` | gauge | `side`, `state` = granted, used |
//! | `hearthnet_transport_queued_bytes`, `hearthnet_transport_buffered_bytes` | gauge | `side` |
//! | `hearthnet_transport_tls_failures_total` | counter | `side`, `cause` |
//! | `hearthnet_transport_late_results_total` | counter | `side` |
//! | `hearthnet_transport_refusals_total` | counter | `side`, `code` |
//!
//! `side` is `host` for the listening side and `caller` for the connecting side. Label values are
//! never taken from a peer's input, so their number is bounded.

use std::io;

use metrics::{Counter, Gauge, counter, gauge};
use rustls::{AlertDescription, CertificateError, Error};

use super::handshake::PATH;
use super::tls::{Refusal, refusal_in, rustls_error};
use crate::code::{Code, SessionClosed};
use crate::session::SessionStats;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum Side {
    /// Listening side.
    Host,
    /// Connecting side.
    Caller,
}

/// Counts a connection that did not become a session or a socket.
pub(crate) fn refused(side: Side, code: Code) {
    counter!("hearthnet_transport_refusals_total", "side" => side.into_str(), "code" => code)
        .increment(1);
}

/// Counts a failed TLS handshake.
pub(crate) fn tls_failed(side: Side, cause: &'static str) {
    counter!("hearthnet_transport_tls_failures_total", "side" => side.into_str(), "cause" => cause)
        .increment(1);
}

fn closed(side: Side, path: &'static str, closed: &SessionClosed) {
    let by = if closed.by_us { "us" } else { "peer" };
    counter!(
        "hearthnet_transport_closed_total",
        "side" => side.into_str(), "path" => path, "by" => by, "code" => closed.code.as_str()
    )
    .increment(1);
}

/// Cause of a failed TLS handshake, in one word.
pub(crate) fn tls_cause(error: &io::Error) -> &'static str {
    if let Some(refusal) = refusal_in(error) {
        return match refusal {
            Refusal::Mismatch { .. } => "wrong_key",
            Refusal::Unusable(_) => "bad_certificate",
        };
    }
    match rustls_error(error) {
        Some(
            Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
            | Error::AlertReceived(AlertDescription::AccessDenied),
        ) => "not_admitted",
        Some(Error::NoCertificatesPresented) => "no_certificate",
        Some(Error::InvalidCertificate(CertificateError::BadSignature)) => "bad_signature",
        Some(Error::InvalidCertificate(_)) => "bad_certificate",
        Some(Error::InvalidMessage(_)) => "not_tls",
        Some(Error::PeerIncompatible(_)) => "incompatible",
        Some(Error::AlertReceived(_)) => "alert",
        Some(_) => "misbehaved",
        None => "broken_off",
    }
}

/// An open socket on a path other than the tensor path.
pub(crate) struct OpenSocket {
    side: Side,
    path: &'static str,
    open: Gauge,
}

impl OpenSocket {
    pub(crate) fn new(side: Side, path: &'static str) -> OpenSocket {
        let open = gauge!("hearthnet_transport_sockets", "side" => side.into_str(), "path" => path);
        open.increment(1.0);
        OpenSocket { side, path, open }
    }

    pub(crate) fn end(self, how: &SessionClosed) {
        self.open.decrement(1.0);
        closed(self.side, self.path, how);
    }
}

/// Metrics of one tensor session. It is part of the gauges until it has ended.
pub(crate) struct SessionMetrics {
    side: Side,
    bytes_in: Counter,
    bytes_out: Counter,
    late_results: Counter,
    gauges: [Gauge; 6],
    /// Statistics that the metrics contain.
    noted: SessionStats,
    open: Option<Gauge>,
}

/// Share of a session in each of [`SessionMetrics::gauges`].
fn levels(stats: &SessionStats) -> [u64; 6] {
    let credit_used = stats.credit_granted.saturating_sub(stats.credit_available);
    [
        stats.credit_granted.into(),
        credit_used.into(),
        stats.steps_granted.into(),
        stats.steps_in_flight.into(),
        stats.queued_bytes,
        stats.buffered_bytes,
    ]
}

impl SessionMetrics {
    pub(crate) fn new(side: Side) -> SessionMetrics {
        let label = side.into_str();
        let bytes = |direction: &'static str| {
            counter!(
                "hearthnet_transport_bytes_total",
                "side" => label, "direction" => direction
            )
        };
        let credit = |state: &'static str| gauge!("hearthnet_transport_credit_chunks", "side" => label, "state" => state);
        let steps = |state: &'static str| gauge!("hearthnet_transport_step_slots", "side" => label, "state" => state);
        let open = gauge!("hearthnet_transport_sessions", "side" => label);
        open.increment(1.0);
        SessionMetrics {
            side,
            bytes_in: bytes("in"),
            bytes_out: bytes("out"),
            late_results: counter!("hearthnet_transport_late_results_total", "side" => label),
            gauges: [
                credit("granted"),
                credit("used"),
                steps("granted"),
                steps("used"),
                gauge!("hearthnet_transport_queued_bytes", "side" => label),
                gauge!("hearthnet_transport_buffered_bytes", "side" => label),
            ],
            noted: SessionStats::default(),
            open: Some(open),
        }
    }

    /// Updates the metrics; called at the end of a driver's turn. With `ended`, takes the session's share out of the gauges.
    pub(crate) fn note(&mut self, stats: &SessionStats, ended: Option<&SessionClosed>) {
        let before = std::mem::replace(&mut self.noted, *stats);
        let received = stats.bytes_received - before.bytes_received;
        self.bytes_in.increment(received);
        self.bytes_out
            .increment(stats.bytes_sent - before.bytes_sent);
        let late = stats.stale_results - before.stale_results;
        self.late_results.increment(late);
        let Some(open) = &self.open else { return };
        let now = match ended {
            None => levels(stats),
            Some(_) => [0; 6],
        };
        for ((gauge, before), now) in self.gauges.iter().zip(levels(&before)).zip(now) {
            if now > before {
                gauge.increment((now - before) as f64);
            } else if now < before {
                gauge.decrement((before - now) as f64);
            }
        }
        if let Some(how) = ended {
            open.decrement(1.0);
            self.open = None;
            closed(self.side, PATH, how);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustls::{InvalidMessage, PeerIncompatible, PeerMisbehaved};

    use super::*;
    use crate::{CloseCode, NodeId};

    #[test]
    fn a_failed_handshake_is_counted_by_its_cause() {
        let found = NodeId::from_checked([1; 32]);
        let unusable = CloseCode::InvalidSignature.violation("a chain");
        let refused = Error::InvalidCertificate;
        for (error, cause) in [
            (Refusal::Mismatch { found }.into(), "wrong_key"),
            (Refusal::Unusable(unusable).into(), "bad_certificate"),
            (refused(CertificateError::BadEncoding), "bad_certificate"),
            (refused(CertificateError::BadSignature), "bad_signature"),
            (
                refused(CertificateError::ApplicationVerificationFailure),
                "not_admitted",
            ),
            (
                Error::AlertReceived(AlertDescription::AccessDenied),
                "not_admitted",
            ),
            (Error::AlertReceived(AlertDescription::DecodeError), "alert"),
            (Error::NoCertificatesPresented, "no_certificate"),
            (
                Error::InvalidMessage(InvalidMessage::InvalidContentType),
                "not_tls",
            ),
            (
                Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon),
                "incompatible",
            ),
            (
                Error::PeerMisbehaved(PeerMisbehaved::TooMuchEarlyDataReceived),
                "misbehaved",
            ),
        ] {
            let error = io::Error::new(io::ErrorKind::InvalidData, error);
            assert_eq!(tls_cause(&error), cause, "{error}");
        }
        let ended = io::ErrorKind::UnexpectedEof.into();
        assert_eq!(tls_cause(&ended), "broken_off");
    }
}
