//! Bounds the number of pending connections: those whose peer has not yet proved to be a member.
//! Chooses which to close when the bound is exceeded.
//!
//! Anyone can connect, so earlier connections must not keep later ones out: at the bound, a pending
//! connection is *evicted* for the new one. It is the oldest of the address with most slots, in the
//! *network* (an IPv4 /24, an IPv6 /64) with most. An honest peer holds its slot for the
//! milliseconds of a handshake. A silent one holds it for seconds, and soon is the oldest.
//!
//! ```text
//!   connects                           proves a member's key
//!   peer ----------> [ by address ] ------------------------------> [ by key ] ----> open
//!              half of the slots are kept for addresses           as many again
//!              at which members were recently
//! ```
//!
//! A home is one network, and all of its members may connect at once when a node starts. So a
//! network may use all free slots, and only loses them to other networks.
//!
//! A member that connects too often is refused after its TLS handshake, so each refusal costs a
//! handshake. Therefore connections from the address of such a member wait for a second before
//! their handshake. That limits the handshakes a second to the slots of one address; a connection
//! evicted meanwhile costs none.
//!
//! *Bound.* Addresses without a recent member can use only half of the slots. To evict a joining
//! node, an attacker there has to connect as often as there are slots within one handshake (32
//! times in some 20 ms); it can never evict a member.
//!
//! The sockets of strangers on a path are bounded in the same way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::NodeId;

/// Limit of remembered addresses of members: each of some 30 members has a few.
const REMEMBERED: usize = 256;

/// Delay of connections from the address of a member that connects too often.
const SLOWDOWN: Duration = Duration::from_secs(1);
/// Limit of remembered addresses with a delay.
const MAX_SLOWED: usize = 256;

/// Limits of pending connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingLimits {
    /// From addresses without a recent member.
    pub(super) unexpected: usize,
    /// From all addresses; the same again for members.
    pub(super) all: usize,
    /// From one address, or of one member.
    pub(super) each: usize,
}

/// Slots of the pending connections.
#[derive(Debug)]
pub(super) struct PendingPeers {
    most: PendingLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In order of arrival.
    waiting: BTreeMap<u64, Waiting>,
    /// Addresses of members, the latest last.
    members_at: VecDeque<IpAddr>,
    /// Addresses of members that connect too often, with the time; the latest last.
    slowed: VecDeque<(IpAddr, Instant)>,
}

#[derive(Debug)]
struct Waiting {
    who: PeerIdentity,
    /// The peer is a member, or a member was recently at its address.
    expected: bool,
    /// Dropping it tells the connection's task of its eviction.
    _place: oneshot::Sender<()>,
}

/// Identity of a pending peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerIdentity {
    At(IpAddr),
    Is(NodeId),
}

impl PeerIdentity {
    /// Group in which connections compete for slots.
    fn network(self) -> PeerIdentity {
        let PeerIdentity::At(address) = self else {
            return self;
        };
        PeerIdentity::At(match subscriber(address) {
            IpAddr::V4(v4) => {
                let [a, b, c, _] = v4.octets();
                [a, b, c, 0].into()
            }
            v6 => v6,
        })
    }
}

/// Address of the subscriber, for limits per address: an IPv4 address itself, or the /64 of an IPv6
/// address, since its holder can use any address in it.
pub fn subscriber(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64).into(),
        v4 => v4,
    }
}

/// Slot of a pending connection; given back when dropped.
#[derive(Debug)]
pub(crate) struct PendingPeer {
    of: Arc<PendingPeers>,
    id: u64,
    pub(super) address: IpAddr,
}

/// Resolves, to an error, when the slot has been evicted or given back.
pub(super) type Evicted = oneshot::Receiver<()>;

impl PendingPeers {
    pub(super) fn new(most: PendingLimits) -> Arc<PendingPeers> {
        Arc::new(PendingPeers {
            most,
            state: Mutex::default(),
        })
    }

    /// Takes a slot for a connection from `address`; evicts another one at the bound.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> (PendingPeer, Evicted) {
        let (place, evicted) = oneshot::channel();
        let mut state = self.state.lock();
        let (id, who) = (state.next, PeerIdentity::At(address));
        state.next += 1;
        let waiting = Waiting {
            who,
            expected: state.members_at.contains(&address),
            _place: place,
        };
        state.waiting.insert(id, waiting);
        state.make_room(&self.most, who);
        let of = Arc::clone(self);
        (PendingPeer { of, id, address }, evicted)
    }
}

impl State {
    /// Evicts connections beyond the limits, after the arrival of `who`.
    fn make_room(&mut self, most: &PendingLimits, who: PeerIdentity) {
        let is_member = |one: &Waiting| matches!(one.who, PeerIdentity::Is(_));
        let bounds = [most.each, most.unexpected, most.all, most.all];
        let counted: [&dyn Fn(&Waiting) -> bool; 4] = [
            &|one| one.who == who,
            &|one| !one.expected,
            &|one| !is_member(one),
            &is_member,
        ];
        for (most, counts) in bounds.into_iter().zip(counted) {
            let all = || self.waiting.iter().filter(|(_, one)| counts(one));
            if all().count() <= most {
                continue;
            }
            let with = |one: &Waiting, of: fn(PeerIdentity) -> PeerIdentity| {
                let same = |(_, other): &(&u64, &Waiting)| of(other.who) == of(one.who);
                all().filter(same).count()
            };
            let weight = |one: &Waiting| (with(one, PeerIdentity::network), with(one, |who| who));
            let first = all().max_by_key(|(id, one)| (weight(one), Reverse(**id)));
            if let Some(first) = first.map(|(id, _)| *id) {
                self.waiting.remove(&first);
            }
        }
    }
}

impl PendingPeer {
    /// The peer has proved to be a member, or to be about to become one. It counts among members
    /// from now on, and its address as one with a recent member.
    pub(super) fn mark_member(&self, key: NodeId) {
        let mut state = self.of.state.lock();
        // `None` if it has been evicted meanwhile.
        let Some(one) = state.waiting.get_mut(&self.id) else {
            return;
        };
        (one.who, one.expected) = (PeerIdentity::Is(key), true);
        state.members_at.retain(|at| *at != self.address);
        state.members_at.push_back(self.address);
        if state.members_at.len() > REMEMBERED {
            state.members_at.pop_front();
        }
        state.make_room(&self.of.most, PeerIdentity::Is(key));
    }
}

impl PendingPeer {
    /// The member has connected too often: delays further connections from its address.
    pub(super) fn slow_down(&self) {
        let mut state = self.of.state.lock();
        state.slowed.retain(|(at, _)| *at != self.address);
        state.slowed.push_back((self.address, Instant::now()));
        if state.slowed.len() > MAX_SLOWED {
            state.slowed.pop_front();
        }
    }

    /// Waits if connections from this address are delayed.
    pub(super) async fn wait_if_slowed(&self) {
        let now = Instant::now();
        let is_slowed = {
            let state = self.of.state.lock();
            let mut slowed = state.slowed.iter();
            slowed.any(|(at, since)| *at == self.address && now < *since + SLOWDOWN)
        };
        if is_slowed {
            sleep_until(now + SLOWDOWN).await;
        }
    }
}

impl Drop for PendingPeer {
    fn drop(&mut self) {
        self.of.state.lock().waiting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use proptest::prelude::*;

    use super::*;

    fn v4(network: u8, host: u8) -> IpAddr {
        [10, 0, network, host].into()
    }

    fn key(n: u8) -> NodeId {
        NodeId::from_checked([n; 32])
    }

    fn waits(one: &PendingPeer) -> bool {
        one.of.state.lock().waiting.contains_key(&one.id)
    }

    fn enter(places: &Arc<PendingPeers>, address: IpAddr) -> PendingPeer {
        places.enter(address).0
    }

    /// Half of the slots are for addresses with a recent member.
    fn places(all: usize, each: usize) -> Arc<PendingPeers> {
        let unexpected = all / 2;
        PendingPeers::new(PendingLimits {
            unexpected,
            all,
            each,
        })
    }

    #[test]
    fn silent_connections_of_four_addresses_evict_no_member_of_the_same_network() {
        let places = places(64, 16);
        let silent = (0..64).map(|n| enter(&places, v4(0, 200 + n / 16)));
        let silent: Vec<PendingPeer> = silent.collect();
        assert_eq!(silent.iter().filter(|one| waits(one)).count(), 32);
        let members: Vec<PendingPeer> = (0..30).map(|n| enter(&places, v4(0, n))).collect();
        assert!(members.iter().all(waits));
        // However often the silent peers return, from as many addresses.
        for n in 0..1000 {
            drop(enter(&places, v4(0, 200 + (n % 4) as u8)));
        }
        assert!(members.iter().all(waits));
    }

    #[test]
    fn the_oldest_connection_of_an_address_is_evicted() {
        let places = places(64, 2);
        let [mut a, mut b, c] = [(); 3].map(|()| places.enter(v4(0, 1)));
        assert_eq!([&a.0, &b.0, &c.0].map(waits), [false, true, true]);
        assert!((&mut a.1).now_or_never().is_some());
        assert!((&mut b.1).now_or_never().is_none());
        drop(b.0);
        assert!(b.1.now_or_never().is_some());
    }

    #[test]
    fn strangers_addresses_cannot_take_slots_kept_for_members_addresses() {
        let places = places(8, 8);
        let home: Vec<IpAddr> = (0..8).map(|n| v4(0, n)).collect();
        for (n, address) in (0..).zip(&home) {
            enter(&places, *address).mark_member(key(n));
        }
        let expected: Vec<PendingPeer> = home[..4].iter().map(|at| enter(&places, *at)).collect();
        let crowd: Vec<_> = (0..200)
            .map(|n| enter(&places, v4(1 + n % 100, n)))
            .collect();
        assert_eq!(crowd.iter().filter(|one| waits(one)).count(), 4);
        assert!(expected.iter().all(waits));
        // They may also use slots that the crowd leaves free.
        drop(crowd);
        let more: Vec<PendingPeer> = home[4..].iter().map(|at| enter(&places, *at)).collect();
        assert!(expected.iter().chain(&more).all(waits));
    }

    #[test]
    fn a_members_connections_evict_only_its_own() {
        let places = places(8, 2);
        let as_member = |n: u8| {
            let one = enter(&places, v4(0, n));
            one.mark_member(key(n));
            one
        };
        let greedy: Vec<PendingPeer> = (0..20).map(|_| as_member(0)).collect();
        assert_eq!(greedy.iter().filter(|one| waits(one)).count(), 2);
        let others: Vec<PendingPeer> = (1..7).map(as_member).collect();
        assert!(others.iter().all(waits));
        let last = as_member(9);
        assert!(others.iter().chain([&last]).all(waits));
        assert_eq!(greedy.iter().filter(|one| waits(one)).count(), 1);
    }

    #[test]
    fn an_invited_stranger_is_not_evicted_for_other_strangers() {
        let places = places(4, 2);
        let [invited, other] = [1, 2].map(|n| enter(&places, v4(n, 1)));
        invited.mark_member(key(1));
        let more: Vec<PendingPeer> = (3..9).map(|n| enter(&places, v4(n, 1))).collect();
        assert!(waits(&invited) && !waits(&other));
        assert_eq!(more.iter().filter(|one| waits(one)).count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_from_a_rate_limited_members_address_are_delayed_by_a_second() {
        let places = places(8, 2);
        let greedy = enter(&places, v4(0, 1));
        greedy.mark_member(key(1));
        greedy.slow_down();
        let begin = Instant::now();
        enter(&places, v4(0, 2)).wait_if_slowed().await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
        enter(&places, v4(0, 1)).wait_if_slowed().await;
        assert_eq!(begin.elapsed(), SLOWDOWN);
        enter(&places, v4(0, 1)).wait_if_slowed().await;
        assert_eq!(begin.elapsed(), SLOWDOWN, "that is over");
    }

    #[test]
    fn remembered_addresses_are_bounded() {
        let places = places(8, 2);
        for n in 0..=u8::MAX {
            enter(&places, v4(1, n)).mark_member(key(1));
            enter(&places, v4(2, n)).mark_member(key(1));
        }
        // Only the latest addresses are remembered.
        let state = places.state.lock();
        assert_eq!(state.members_at.len(), REMEMBERED);
        assert_eq!(state.members_at.front(), Some(&v4(1, 128)));
    }

    #[test]
    fn networks_are_ipv4_slash_24_and_ipv6_slash_64() {
        let at = |text: &str| PeerIdentity::At(text.parse().unwrap()).network();
        assert_eq!(at("192.168.1.7"), at("192.168.1.250"));
        assert_ne!(at("192.168.1.7"), at("192.168.2.7"));
        assert_eq!(at("fd00::1:2:3:4"), at("fd00::9"));
        assert_ne!(at("fd00:0:0:1::1"), at("fd00:0:0:2::1"));
    }

    #[test]
    fn subscribers_are_ipv4_addresses_and_ipv6_slash_64_networks() {
        let of = |text: &str| subscriber(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(of("192.168.1.7"), "192.168.1.7");
        assert_eq!(of("::ffff:192.168.1.7"), "192.168.1.7");
    }

    proptest! {
        #[test]
        fn there_are_never_more_than_may_be(
            arrivals in prop::collection::vec((0u8..4, 0u8..12, any::<bool>(), any::<bool>()), 0..200),
        ) {
            let places = places(8, 3);
            let mut here = Vec::new();
            for (network, host, member, leaves) in arrivals {
                let one = enter(&places, v4(network, host));
                prop_assert!(waits(&one), "who comes has a place");
                if member {
                    one.mark_member(key(host));
                    prop_assert!(waits(&one));
                }
                if !leaves {
                    here.push(one);
                }
                let state = places.state.lock();
                let members = state.waiting.values().filter(|one| matches!(one.who, PeerIdentity::Is(_)));
                let members = members.count();
                prop_assert!(state.waiting.values().filter(|one| !one.expected).count() <= 4);
                prop_assert!(state.waiting.len() - members <= 8 && members <= 8);
            }
            drop(here);
            prop_assert!(places.state.lock().waiting.is_empty());
        }
    }
}
