//! What the operating system says of this process, in the words that Prometheus' own libraries use.

use crate::metrics::exposition::MetricsWriter;

/// Adds the figures; those that cannot be had are left out.
pub(crate) fn write(page: &mut MetricsWriter) {
    let Some(figures) = ProcStats::read() else { return };
    let mut counter = |name, help, value: f64| page.counters(name, help).add(&[], value);
    counter("process_cpu_seconds_total", "User and system CPU time in seconds.", figures.cpu_seconds);
    page.gauge("process_resident_memory_bytes", "Resident memory in bytes.", figures.resident);
    page.gauge("process_virtual_memory_bytes", "Virtual memory in bytes.", figures.mapped);
    page.gauge("process_start_time_seconds", "Start time since the Unix epoch in seconds.", figures.started);
    page.gauge("process_threads", "Number of threads.", figures.threads);
    if let Some(open) = figures.open_files {
        page.gauge("process_open_fds", "Number of open file descriptors.", open);
    }
    if let Some(most) = figures.max_files {
        page.gauge("process_max_fds", "Maximum number of open file descriptors.", most);
    }
}

/// How much memory of the machine's it takes.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    ProcStats::read().map(|figures| figures.resident)
}

struct ProcStats {
    cpu_seconds: f64,
    resident: u64,
    mapped: u64,
    started: f64,
    threads: u64,
    open_files: Option<usize>,
    max_files: Option<u64>,
}

impl ProcStats {
    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The name stands in parentheses, and may have some of its own.
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split(' ').collect();
        let number = |field: usize| fields.get(field - 3).and_then(|text| text.trim().parse::<u64>().ok());
        // Linux tells times in hundredths of a second and sizes in pages of what `auxv` says; both are so on all that we run on.
        let (ticks, page) = (100.0, 4_096);
        let boot = std::fs::read_to_string("/proc/stat").ok()?;
        let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
        Some(Self {
            cpu_seconds: (number(14)? + number(15)?) as f64 / ticks,
            threads: number(20)?,
            started: boot + number(22)? as f64 / ticks,
            mapped: number(23)?,
            resident: number(24)? * page,
            open_files: std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count),
            max_files: files.and_then(|rest| rest.split_whitespace().next()?.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::exposition::ExpositionFormat;

    #[test]
    fn the_stats_are_those_of_this_process() {
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        write(&mut page);
        let text = page.finish();
        let figure = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
        };
        assert!(figure("process_resident_memory_bytes") > 100_000.0);
        assert!(figure("process_open_fds") >= 3.0);
        assert!(figure("process_start_time_seconds") > 1.7e9);
        assert!(figure("process_threads") >= 1.0);
    }
}
