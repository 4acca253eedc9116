//! Time of a session: PINGs and keep-alive, progress of incomplete input, deadlines.

use std::time::Duration;

use super::protocol::Protocol as _;
use super::rate::ProgressTimer;
use super::{Session, State};
use crate::code::CloseCode;
use crate::time::Time;
use crate::wire::FrameType;
use crate::wire::control;

impl Session {
    pub(super) fn send_ping(&mut self, now: Time) {
        let token = self.next_ping;
        self.next_ping = self.next_ping.wrapping_add(1);
        self.ping = Some((token, now));
        self.urgent.push_back(control::ping(FrameType::Ping, token));
    }

    /// Sends a PING, unless one is unanswered.
    pub fn probe(&mut self, now: Time) {
        if self.state == State::Open && self.ping.is_none() {
            self.send_ping(now);
        }
    }

    /// Time since the last data from the peer.
    pub fn silent_for(&self, now: Time) -> Duration {
        now.since(self.last_received)
    }

    /// Time for which a PING has been unanswered. `None` if there is none, or if other data has
    /// come since.
    pub fn unanswered_for(&self, now: Time) -> Option<Duration> {
        let (_, asked) = self.ping?;
        (self.last_received <= asked).then(|| now.since(asked))
    }

    /// Reports `bytes` received of an incomplete message (0: none has begun).
    pub fn handle_partial(&mut self, now: Time, bytes: u64) {
        if self.state != State::Closed && bytes != self.partial_message {
            self.partial_message = bytes;
            self.last_received = now;
        }
        self.track_progress(now);
    }

    fn received_so_far(&self) -> u64 {
        self.stats
            .bytes_received
            .saturating_add(self.partial_message)
    }

    /// Starts or stops the timer for incomplete input.
    pub(super) fn track_progress(&mut self, now: Time) {
        let open = self.state == State::Open;
        let incomplete = self.partial_message > 0 || self.inbox.is_receiving();
        if !(open && incomplete) {
            self.progress = None;
        } else if self.progress.is_none() || self.inbox.withholds() || self.is_congested() {
            // While the application holds credit back, the peer cannot make progress.
            self.progress = Some(ProgressTimer::new(now, self.received_so_far()));
        }
    }

    /// Time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Time {
        let d = &self.config.deadlines;
        match self.state {
            State::Closed => Time::NEVER,
            State::HelloSent | State::AwaitHello | State::AwaitAdmission => {
                self.opened_at + d.hello
            }
            State::Open => {
                let mut next = self.opened_at + self.lifetime;
                next = next.min(self.keep_alive_at());
                if let Some(since) = self.credit_blocked {
                    next = next.min(since + d.credit);
                }
                if let Some(progress) = self.progress {
                    next = next.min(progress.due(d.stall));
                }
                next
            }
        }
    }

    /// Time of the next PING, or of the end of a silent session.
    fn keep_alive_at(&self) -> Time {
        let keep_alive = self.config.keep_alive;
        match self.ping {
            // A PING is unanswered: the peer has one more interval.
            Some((_, at)) => at.max(self.last_received) + keep_alive,
            None => self.last_received + keep_alive,
        }
    }

    /// Handles all deadlines that have passed.
    pub fn handle_timeout(&mut self, now: Time) {
        if now < self.poll_timeout() {
            return;
        }
        let d = &self.config.deadlines;
        let (received, stall, min_rate) = (self.received_so_far(), d.stall, d.min_rate);
        let (code, detail) = if self.state != State::Open {
            (CloseCode::PipelineStalled, "no HELLO within the deadline")
        } else if now >= self.opened_at + self.lifetime {
            let detail = "the session reached its lifetime";
            (CloseCode::SessionExpired, detail)
        } else if let Some(since) = self.credit_blocked
            && now >= since + d.credit
        {
            (CloseCode::CreditStall, "no credit within the deadline")
        } else if let Some(progress) = &mut self.progress
            && progress.is_slow(now, received, stall, min_rate)
            && !(self.inbox.withholds() || self.is_congested())
        {
            let detail = "a message or tensor came in too slowly";
            (CloseCode::PipelineStalled, detail)
        } else if now < self.keep_alive_at() {
            return;
        } else if self.is_congested() {
            // Reading is paused while the application is behind, so silence proves nothing.
            self.last_received = now;
            return;
        } else if self.ping.is_none() {
            return self.send_ping(now);
        } else {
            let detail = "the peer was silent for two keep-alive intervals";
            (CloseCode::KeepAlive, detail)
        };
        self.close(code, detail);
    }
}
