//! A connection costs its maker a packet and the host a place, until it says who it is. Ten thousand of them,
//! from many addresses, may take the places that there are for such, and no more: no memory, no file, and
//! no place of a member. (Pings, of whoever is in, case 6 has.)

use std::collections::VecDeque;
use std::net::SocketAddr;

use tokio::net::{TcpSocket, TcpStream};

use crate::honest::Call;
use crate::{Bench, Findings, HarnessError};

const CONNECTIONS: u32 = 10_000;
/// Addresses that they come from, in all networks of four.
const ADDRESSES: u32 = 200;
const NETWORKS: u32 = 4;
/// How many the crowd itself keeps open; the host has ended most of them.
const KEPT: usize = 256;
/// A member comes each time after so many.
const BETWEEN: u32 = 500;

/// A connection from one of many addresses of this machine.
async fn from(number: u32, to: SocketAddr) -> Result<TcpStream, HarnessError> {
    let (network, host) = (number % NETWORKS, number % ADDRESSES);
    let address = [127, 1, network as u8, 2 + host as u8];
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((address, 0)))?;
    Ok(socket.connect(to).await?)
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let addr = bench.target.addr;
    let before = bench.victim.gauges().await?.raised("connection_limit");
    let (mut crowd, mut members) = (VecDeque::new(), 0);
    for number in 0..CONNECTIONS {
        crowd.push_back(from(number, addr).await?);
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
    // Those that the crowd has closed itself made no room.
    let what = "connections of the crowd that made room";
    found.counted(what, "some", gone, gone > 0, "connection_limit");
    drop(crowd);
    Ok(())
}
