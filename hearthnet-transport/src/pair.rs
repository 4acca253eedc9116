//! Two sessions joined in memory, in virtual time: for tests and simulation.
//!
//! Messages move only on request. [`Pair::transmit`] moves one message from a session onto its
//! wire, [`Pair::deliver`] takes one off. [`Pair::run`] does both until neither side has anything
//! to send, and [`Pair::advance`] moves the clock. So every interleaving can be produced, and
//! repeated.
//!
//! ```
//! use hearthnet_transport::pair::Pair;
//! use hearthnet_transport::session::Event;
//! use hearthnet_transport::{Config, Message, StreamOpen};
//!
//! let mut pair = Pair::open(&Config::default(), &Config::default());
//! let open = StreamOpen {
//!     stream: 1, epoch: 0, weights: [0; 32], lo: 0, hi: 7, max_positions: 64, fork: None,
//! };
//! pair.caller.send_message(&Message::StreamOpen(open.clone())).unwrap();
//! pair.run();
//! assert_eq!(pair.host.poll_event(), Some(Event::Message(Message::StreamOpen(open))));
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use crate::config::Config;
use crate::session::{Event, Session};
use crate::time::Time;
use crate::wire::control::Hello;

/// Limit of messages moved by one call: a pair that never stops talking is a defect.
const MAX_STEPS: usize = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that connects.
    Caller,
    /// The side that listens.
    Host,
}

/// Two sessions and the wires between them.
#[derive(Debug)]
pub struct Pair {
    /// The side that connects.
    pub caller: Session,
    /// The side that listens.
    pub host: Session,
    now: Time,
    /// Messages on the way to each [`Side`].
    wires: [VecDeque<Bytes>; 2],
}

impl Pair {
    /// A pair before HELLO.
    pub fn new(caller: &Config, host: &Config, hello: &Hello) -> Pair {
        Pair {
            caller: Session::caller(caller, hello, Time::ZERO),
            host: Session::host(host, Time::ZERO),
            now: Time::ZERO,
            wires: Default::default(),
        }
    }

    /// A pair with an open session, and empty queues on both sides.
    pub fn open(caller: &Config, host: &Config) -> Pair {
        let mut pair = Pair::new(caller, host, &Hello::new("pipeline", Vec::new()));
        pair.run();
        if let Some(Event::Hello(_)) = pair.host.poll_event() {
            pair.host.accept(pair.now);
        }
        pair.run();
        while pair.host.poll_event().is_some() || pair.caller.poll_event().is_some() {}
        pair
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Moves one message from a session onto its wire, if there is one.
    pub fn transmit(&mut self, from: Side) -> bool {
        let (session, to) = match from {
            Side::Caller => (&mut self.caller, Side::Host),
            Side::Host => (&mut self.host, Side::Caller),
        };
        let frame = session.poll_transmit(self.now);
        let moved = frame.is_some();
        self.wires[to as usize].extend(frame);
        moved
    }

    /// Hands one message from the wire to a session, if there is one.
    pub fn deliver(&mut self, to: Side) -> bool {
        let Some(message) = self.wires[to as usize].pop_front() else {
            return false;
        };
        match to {
            Side::Caller => self.caller.handle_message(self.now, &message),
            Side::Host => self.host.handle_message(self.now, &message),
        }
        true
    }

    /// Puts a message on the wire to `to`, as a misbehaving peer would.
    pub fn inject(&mut self, to: Side, message: impl Into<Bytes>) {
        self.wires[to as usize].push_back(message.into());
    }

    /// Messages on the wire to `to`.
    pub fn wire(&self, to: Side) -> impl ExactSizeIterator<Item = &Bytes> {
        self.wires[to as usize].iter()
    }

    /// Transmits and delivers until neither side has anything to send. Events stay queued.
    pub fn run(&mut self) {
        for _ in 0..MAX_STEPS {
            let mut moved = false;
            for side in [Side::Caller, Side::Host] {
                moved |= self.transmit(side);
            }
            for side in [Side::Host, Side::Caller] {
                moved |= self.deliver(side);
            }
            if !moved {
                return;
            }
        }
        debug_assert!(false, "the pair does not come to rest");
    }

    /// Moves the clock only.
    pub fn tick(&mut self, by: Duration) {
        self.now = self.now + by;
    }

    /// Moves the clock, stopping at every deadline on the way.
    pub fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        for _ in 0..MAX_STEPS {
            self.run();
            let next = self.caller.poll_timeout().min(self.host.poll_timeout());
            if next > end {
                self.now = end;
                return;
            }
            self.now = self.now.max(next);
            self.caller.handle_timeout(self.now);
            self.host.handle_timeout(self.now);
        }
        debug_assert!(false, "the timers do not come to rest");
    }
}
