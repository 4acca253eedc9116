//! A connection costs the attacker one packet and the host a handshake slot until the peer has
//! identified itself. Ten thousand connections from many addresses may use only the slots for that
//! purpose: no memory, no file, and no slot of a member. (Ping floods by members are case 6.)

use std::collections::VecDeque;
use std::net::SocketAddr;

use tokio::net::TcpSocket;

use super::prelude::*;

const CONNECTIONS: u32 = 10_000;
/// Source addresses of the crowd, spread over four networks.
const ADDRESSES: u32 = 200;
const NETWORKS: u32 = 4;
/// Connections that the crowd keeps open; the host has ended most of them.
const KEPT: usize = 256;
/// Connections of the crowd between two sessions of a member.
const BETWEEN: u32 = 500;

/// Connects from an address of this machine.
pub(super) async fn from(address: [u8; 4], to: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((address, 0)))?;
    Ok(socket.connect(to).await?)
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let addr = bench.target.addr;
    let before = bench.victim.gauges().await?.raised("connection_limit");
    let (mut crowd, mut members) = (VecDeque::new(), 0);
    for number in 0..CONNECTIONS {
        let (network, host) = (number % NETWORKS, number % ADDRESSES);
        let address = [127, 1, network as u8, 2 + host as u8];
        crowd.push_back(from(address, addr).await?);
        if crowd.len() > KEPT {
            crowd.pop_front();
        }
        if number % BETWEEN == 0
            && let Ok(call) = Call::open(&bench.target, &bench.guest, 1).await
        {
            members += u32::from(call.close().await.is_ok());
        }
    }
    let all = CONNECTIONS / BETWEEN;
    found.same("sessions of a member meanwhile", all, members);
    let gone = bench.victim.gauges().await?.raised("connection_limit") - before;
    // Connections that the crowd closed itself are not counted.
    let what = "connections of the crowd that made room";
    found.counted(what, "some", gone, gone > 0, "connection_limit");
    drop(crowd);
    Ok(())
}
