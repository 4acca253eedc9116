//! Bounded fair queue in front of a bounded number of running slots. Pure.
//!
//! ```text
//! enter --> a slot is free    --> Run            finish --> a slot is free again:
//!       --> no slot is free   --> Wait (ticket)             the next caller's oldest item runs
//!       --> the queue is full --> Full           leave  --> a waiting item is given back
//! ```
//!
//! A caller with no running item may use a reserved slot beyond the shared ones
//! ([`QueueLimits::reserved`]), so that one caller with long items cannot block all others. The
//! [`OWNER`] of the machine has one more slot, and may always have one waiting item.
//!
//! Callers are served round-robin: between two items of one caller, every other waiting caller gets
//! one. With one slot and the arrivals `a1 a2 a3 b1 c1`, the order is `a1 a2 b1 c1 a3`.

use std::collections::VecDeque;

/// Numbers of running and waiting items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Shared running slots, at least 1.
    pub places: usize,
    /// Waiting items of all callers together.
    pub waiting: usize,
    /// Waiting items of one caller.
    pub waiting_per_caller: usize,
    /// Extra slots for callers with no running item. The owner has one more.
    pub reserved: usize,
}

impl QueueLimits {
    /// Maximum number of running items, including reserved slots.
    pub fn most_running(&self) -> usize {
        self.places + self.reserved + 1
    }
}

/// [`Principal::identity`] of the machine's owner, and of no other caller.
pub const OWNER: &str = "owner";

/// Caller in the queue. Callers take turns by the whole of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Principal {
    /// Verified identity: an account or an address. Limits count by it.
    pub identity: String,
    /// Part that the caller chooses, such as the user that it names; empty if there is none.
    pub user: String,
}

impl From<&str> for Principal {
    fn from(identity: &str) -> Self {
        Self {
            identity: identity.to_owned(),
            user: String::new(),
        }
    }
}

/// Id of a waiting item. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Outcome of [`FairQueue::enter`].
#[derive(Debug, PartialEq, Eq)]
pub enum Entry<T> {
    /// The item runs; [`FairQueue::finish`] must follow.
    Run(T),
    Wait(Ticket),
    Full(Refused),
}

/// Limit that an item exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    Queue,
    /// This caller has the maximum number of waiting items.
    Caller,
}

#[derive(Debug)]
pub struct FairQueue<T> {
    limits: QueueLimits,
    /// Verified caller of each running item.
    running: Vec<String>,
    next: u64,
    /// Waiting callers in round-robin order, each with at least one item.
    ring: VecDeque<Line<T>>,
}

#[derive(Debug)]
struct Line<T> {
    caller: Principal,
    items: VecDeque<(Ticket, T)>,
}

impl<T> FairQueue<T> {
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits: QueueLimits {
                places: limits.places.max(1),
                ..limits
            },
            running: Vec::new(),
            next: 0,
            ring: VecDeque::new(),
        }
    }

    /// Number of slots open to a verified caller. One with running items has no reserved slot.
    fn places_of(&self, identity: &str) -> usize {
        match self.running.iter().any(|caller| caller == identity) {
            true => self.limits.places,
            false if identity == OWNER => self.limits.most_running(),
            false => self.limits.places + self.limits.reserved,
        }
    }

    /// Adds an item.
    pub fn enter(&mut self, caller: &Principal, item: T) -> Entry<T> {
        let waits = self.waiting_for(&caller.identity) > 0;
        // Waiting items go first: while one waits, no slot is free that it may use.
        let places = match waits {
            true => self.limits.places,
            false => self.places_of(&caller.identity),
        };
        if self.running.len() < places {
            self.running.push(caller.identity.clone());
            return Entry::Run(item);
        }
        let is_owed = caller.identity == OWNER && !waits;
        if self.waiting() >= self.limits.waiting && !is_owed {
            return Entry::Full(Refused::Queue);
        }
        if self.room_of(caller) == 0 {
            return Entry::Full(Refused::Caller);
        }
        let ticket = Ticket(self.next);
        match self.ring.iter_mut().find(|line| line.caller == *caller) {
            Some(line) => line.items.push_back((ticket, item)),
            None => self.ring.push_back(Line {
                caller: caller.clone(),
                items: VecDeque::from([(ticket, item)]),
            }),
        }
        self.next += 1;
        Entry::Wait(ticket)
    }

    /// Ends a running item of a verified caller and returns the next one to run.
    pub fn finish(&mut self, identity: &str) -> Option<T> {
        if let Some(at) = self.running.iter().position(|caller| caller == identity) {
            self.running.swap_remove(at);
        }
        let running = self.running.len();
        let may_run = |line: &Line<T>| running < self.places_of(&line.caller.identity);
        let next = self.ring.iter().position(may_run)?;
        let mut line = self.ring.remove(next)?;
        self.running.push(line.caller.identity.clone());
        let item = line.items.pop_front();
        if !line.items.is_empty() {
            self.ring.push_back(line);
        }
        item.map(|(_, item)| item)
    }

    /// Removes a waiting item. `None` if it already runs or was removed.
    pub fn leave(&mut self, ticket: Ticket) -> Option<T> {
        for (place, line) in self.ring.iter_mut().enumerate() {
            let Some(at) = line.items.iter().position(|(t, _)| *t == ticket) else {
                continue;
            };
            let item = line.items.remove(at);
            if line.items.is_empty() {
                self.ring.remove(place);
            }
            return item.map(|(_, item)| item);
        }
        None
    }

    /// Removes all waiting items; running ones continue.
    pub fn clear(&mut self) -> Vec<T> {
        let lines = std::mem::take(&mut self.ring);
        lines
            .into_iter()
            .flat_map(|line| line.items)
            .map(|(_, item)| item)
            .collect()
    }

    /// Number of items that a caller may add under its own limits: per principal, and, if a
    /// verified caller uses several, three quarters of the queue for all of them.
    fn room_of(&self, caller: &Principal) -> usize {
        let line = self.ring.iter().find(|line| line.caller == *caller);
        let own = line.map_or(0, |line| line.items.len());
        let room = self.limits.waiting_per_caller.saturating_sub(own);
        let all = self.waiting_for(&caller.identity);
        let most = self.limits.waiting - self.limits.waiting / 4;
        match all > own {
            true => room.min(most.saturating_sub(all)),
            false => room,
        }
    }

    /// Waiting items of a verified caller, on behalf of all its users.
    fn waiting_for(&self, identity: &str) -> usize {
        let lines = self
            .ring
            .iter()
            .filter(|line| line.caller.identity == identity);
        lines.map(|line| line.items.len()).sum()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.ring.iter().map(|line| line.items.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns<T>(places: usize, waiting: usize, per_caller: usize, reserved: usize) -> FairQueue<T> {
        FairQueue::new(QueueLimits {
            places,
            waiting,
            waiting_per_caller: per_caller,
            reserved,
        })
    }

    fn user(identity: &str, user: impl ToString) -> Principal {
        Principal {
            user: user.to_string(),
            ..Principal::from(identity)
        }
    }

    /// Outcome for an item of a caller.
    fn enter<T>(turns: &mut FairQueue<T>, caller: impl Into<Principal>, item: T) -> &'static str {
        match turns.enter(&caller.into(), item) {
            Entry::Run(_) => "run",
            Entry::Wait(_) => "wait",
            Entry::Full(Refused::Queue) => "queue",
            Entry::Full(Refused::Caller) => "caller",
        }
    }

    #[test]
    fn a_caller_with_nothing_running_gets_the_reserved_slot() {
        let mut turns = turns(4, 8, 8, 1);
        for n in 0..4 {
            let hog = user("hog", "one of many");
            assert_eq!(enter(&mut turns, hog, n), "run");
        }
        // A second user does not make a second caller.
        let another = user("hog", "another");
        assert_eq!(enter(&mut turns, another, 4), "wait");
        assert_eq!(enter(&mut turns, "guest", 5), "run");
        // There is one reserved slot, not one per caller.
        assert_eq!(enter(&mut turns, "late", 6), "wait");
        // The reserved slot passes to a caller with no running item, before its turn ...
        assert_eq!(turns.finish("guest"), Some(6));
        // ... and to no other caller.
        assert_eq!(turns.finish("late"), None);
        assert_eq!((turns.running(), turns.waiting()), (4, 1));
        assert_eq!(turns.finish("hog"), Some(4));
    }

    #[test]
    fn the_owner_always_has_a_running_and_a_waiting_slot() {
        let mut turns = turns(2, 2, 2, 1);
        let outcomes = [0, 1, 2, 3, 4].map(|n| {
            let neighbour = format!("neighbour {n}");
            enter(&mut turns, neighbour.as_str(), n)
        });
        assert_eq!(outcomes, ["run", "run", "run", "wait", "wait"]);
        assert_eq!(enter(&mut turns, "late", 5), "queue");
        assert_eq!(enter(&mut turns, user(OWNER, "a"), 6), "run");
        assert_eq!(enter(&mut turns, user(OWNER, "b"), 7), "wait");
        assert_eq!(enter(&mut turns, user(OWNER, "c"), 8), "queue");
        // The owner's slot stays reserved: when its item ends, its waiting item takes it.
        assert_eq!(turns.finish(OWNER), Some(7));
        // When another caller's item ends, the owner's item counts against the shared slots.
        assert_eq!(turns.finish("neighbour 0"), None);
        assert_eq!((turns.running(), turns.waiting()), (3, 2));
    }

    #[test]
    fn a_caller_of_many_names_leaves_a_quarter_of_the_queue_to_others() {
        let mut turns = turns(1, 8, 8, 0);
        assert_eq!(enter(&mut turns, "hog", 0), "run");
        let outcomes = [1, 2, 3, 4, 5, 6, 7].map(|n| enter(&mut turns, user("hog", n), n));
        assert_eq!(
            outcomes,
            ["wait", "wait", "wait", "wait", "wait", "wait", "caller"]
        );
        assert_eq!(enter(&mut turns, "guest", 8), "wait");
    }

    #[test]
    fn callers_take_turns_as_the_documentation_says() {
        let mut turns = turns(1, 8, 8, 0);
        let arrivals = ["a1", "a2", "a3", "b1", "c1"];
        let outcomes = arrivals.map(|item| enter(&mut turns, &item[..1], item));
        assert_eq!(outcomes, ["run", "wait", "wait", "wait", "wait"]);
        let order = ["a", "a", "b", "c", "a"].map(|caller| turns.finish(caller));
        assert_eq!(
            order,
            [Some("a2"), Some("b1"), Some("c1"), Some("a3"), None]
        );
        assert_eq!((turns.running(), turns.waiting()), (0, 0));
    }

    #[test]
    fn a_refusal_names_the_limit_that_was_reached() {
        let mut turns = turns(1, 2, 1, 0);
        let outcomes = ["a", "a", "a", "b", "c"].map(|name| enter(&mut turns, name, ()));
        assert_eq!(outcomes, ["run", "wait", "caller", "wait", "queue"]);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Enter(u8),
        Finish,
        Leave(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..5u8).prop_map(Op::Enter),
            3 => Just(Op::Finish),
            1 => any::<usize>().prop_map(Op::Leave),
        ]
    }

    proptest! {
        /// Compares the queue with a plain list and checks the rules after every step.
        #[test]
        fn limits_hold_no_item_is_lost_and_no_caller_is_passed_over(
            places in 1..4usize,
            waiting in 0..7usize,
            per_caller in 0..4usize,
            ops in prop::collection::vec(op(), 0..200),
        ) {
            let mut turns = turns(places, waiting, per_caller, 0);
            // Callers of the running items, oldest first.
            let mut running: Vec<u8> = Vec::new();
            let mut line: Vec<(Ticket, (u8, usize))> = Vec::new();
            // Step at which each caller began to wait, and at which it was last served.
            let mut since = [None; 5];
            let mut served = [None; 5];
            for (n, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Enter(caller) => {
                        let item = (caller, n);
                        let own = line.iter().filter(|(_, i)| i.0 == caller).count();
                        match turns.enter(&caller.to_string().as_str().into(), item) {
                            Entry::Run(back) => {
                                prop_assert_eq!(back, item);
                                prop_assert!(line.is_empty());
                                running.push(caller);
                            }
                            Entry::Wait(ticket) => {
                                prop_assert_eq!(running.len(), places);
                                prop_assert!(line.iter().all(|(t, _)| *t != ticket));
                                since[caller as usize].get_or_insert(n);
                                line.push((ticket, item));
                            }
                            Entry::Full(Refused::Queue) => prop_assert_eq!(line.len(), waiting),
                            Entry::Full(Refused::Caller) => prop_assert_eq!(own, per_caller),
                        }
                    }
                    Op::Finish if running.is_empty() => {}
                    Op::Finish => match turns.finish(&running.remove(0).to_string()) {
                        None => prop_assert!(line.is_empty()),
                        Some(item) => {
                            running.push(item.0);
                            // The oldest of its caller.
                            let at = line.iter().position(|(_, i)| i.0 == item.0).unwrap();
                            prop_assert_eq!(line.remove(at).1, item);
                            let caller = item.0 as usize;
                            for other in (0..5).filter(|other| *other != caller) {
                                if let (Some(waits), Some(last)) = (since[other], served[caller]) {
                                    prop_assert!(waits > last, "{other} was passed over");
                                }
                            }
                            served[caller] = Some(n);
                            since[caller] = line.iter().any(|(_, i)| i.0 == item.0).then_some(n);
                        }
                    },
                    Op::Leave(which) if !line.is_empty() => {
                        let (ticket, item) = line.remove(which % line.len());
                        prop_assert_eq!(turns.leave(ticket), Some(item));
                        prop_assert_eq!(turns.leave(ticket), None);
                        if line.iter().all(|(_, i)| i.0 != item.0) {
                            since[item.0 as usize] = None;
                        }
                    }
                    Op::Leave(_) => prop_assert_eq!(turns.leave(Ticket(u64::MAX)), None),
                }
                prop_assert_eq!(turns.running(), running.len());
                prop_assert_eq!(turns.waiting(), line.len());
                prop_assert!(running.len() <= places && line.len() <= waiting);
            }
            let mut left: Vec<_> = turns.clear();
            let mut expected: Vec<_> = line.into_iter().map(|(_, item)| item).collect();
            left.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(left, expected);
            prop_assert_eq!(turns.waiting(), 0);
        }
    }
}
