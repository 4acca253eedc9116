//! Power supply of the machine.

use std::fs;
use std::path::Path;

/// Whether the machine runs on a battery: a battery of its own discharges, and no other supply is
/// plugged in. `false` on a machine without a battery, and if the system reports nothing.
pub fn on_battery() -> bool {
    is_on_battery(Path::new("/sys/class/power_supply"))
}

/// `supplies` has a folder for each power supply (`Documentation/ABI/testing/sysfs-class-power` in
/// the kernel's sources).
fn is_on_battery(supplies: &Path) -> bool {
    let (mut discharges, mut plugged_in) = (false, false);
    for supply in fs::read_dir(supplies).into_iter().flatten().flatten() {
        let text = |name: &str| fs::read_to_string(supply.path().join(name)).unwrap_or_default();
        let is = |name: &str, value: &str| text(name).trim() == value;
        // The battery of a mouse or a keyboard.
        if is("scope", "Device") {
            continue;
        }
        match text("type").trim() {
            "Battery" | "UPS" => discharges |= is("status", "Discharging"),
            _ => plugged_in |= is("online", "1"),
        }
    }
    discharges && !plugged_in
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Machine with supplies, each of them files and their contents.
    fn machine(supplies: &[&[(&str, &str)]]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        for (index, supply) in supplies.iter().enumerate() {
            let folder = dir.path().join(format!("supply-{index}"));
            fs::create_dir(&folder).unwrap();
            for (name, value) in *supply {
                fs::write(folder.join(name), format!("{value}\n")).unwrap();
            }
        }
        is_on_battery(dir.path())
    }

    #[test]
    fn only_a_discharging_battery_of_the_machine_without_a_plug_counts() {
        let battery = |status| [("type", "Battery"), ("status", status)];
        let mains = |online| [("type", "Mains"), ("online", online)];
        assert!(machine(&[&battery("Discharging"), &mains("0")]));
        assert!(machine(&[&battery("Discharging")]));
        assert!(!machine(&[&battery("Charging"), &mains("1")]));
        assert!(!machine(&[&battery("Full"), &mains("1")]));
        // A weak plug, beside which the battery discharges.
        assert!(!machine(&[&battery("Discharging"), &mains("1")]));
        let mouse = [
            ("type", "Battery"),
            ("scope", "Device"),
            ("status", "Discharging"),
        ];
        assert!(!machine(&[&mouse]));
        assert!(!machine(&[&[("type", "\u{fffd}")], &[]]));
        assert!(!machine(&[]) && !is_on_battery(Path::new("/nowhere")));
    }
}
