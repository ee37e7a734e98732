package tollgate

import (
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Rate limit fields of any server's responses: how long not to call it, and what remains. Malformed fields are ignored.

const maxWaitMs = 3_600_000

// signals is what a response says about the limits of its server; -1 is unknown.
type signals struct {
	refused                       bool
	wait, limit, remaining, reset int64
}

type member struct {
	name                    string
	remaining, reset, limit int64
}

// readSignals reads header lines at now, in milliseconds since 1970.
func readSignals(status int, lines [][2]string, now int64) signals {
	fields := map[string]string{}
	for _, line := range lines {
		name := strings.ToLower(line[0])
		if name != "retry-after" && !strings.HasPrefix(name, "ratelimit") &&
			!strings.HasPrefix(name, "x-ratelimit-") && !strings.HasPrefix(name, "x-rate-limit-") {
			continue
		}
		if before, ok := fields[name]; ok {
			fields[name] = before + ", " + line[1]
		} else {
			fields[name] = line[1]
		}
	}
	for name, value := range fields {
		fields[name] = strings.Trim(value, " \t")
	}
	said := signals{wait: -1, limit: -1, remaining: -1, reset: -1}
	if status == 403 || status == 429 || status == 503 {
		said.wait = duration(fields["retry-after"], now)
	}
	members := ietfMembers(fields)
	if len(members) == 0 {
		if legacy, ok := legacyMember(fields, now); ok {
			members = append(members, legacy)
		}
	}
	for at, each := range members {
		if each.remaining == 0 && each.reset > said.wait {
			said.wait = each.reset
		}
		if at == 0 || each.remaining < said.remaining || each.remaining == said.remaining && each.reset > said.reset {
			said.limit, said.remaining, said.reset = each.limit, each.remaining, each.reset
		}
	}
	said.wait, said.reset = min(said.wait, maxWaitMs), min(said.reset, maxWaitMs)
	said.refused = status == 429 || status == 503 || status == 403 && said.wait >= 0
	return said
}

// seconds returns seconds as milliseconds, rounded up; -1 if malformed.
func seconds(value string) int64 {
	whole, fraction, hasFraction := strings.Cut(value, ".")
	if !isDigits(whole, 1<<30) || hasFraction && !isDigits(fraction, 1<<30) {
		return -1
	}
	ms := int64(999_999_999_999_999)
	if len(whole) <= 15 {
		ms, _ = strconv.ParseInt(whole, 10, 64)
	}
	padded := (fraction + "000")[:3]
	extra, _ := strconv.ParseInt(padded, 10, 64)
	if len(fraction) > 3 && strings.Trim(fraction[3:], "0") != "" {
		extra++
	}
	return ms*1000 + extra
}

func isDigits(value string, most int) bool {
	if value == "" || len(value) > most {
		return false
	}
	for at := 0; at < len(value); at++ {
		if value[at] < '0' || value[at] > '9' {
			return false
		}
	}
	return true
}

func count(value string) int64 {
	if !isDigits(value, 15) {
		return -1
	}
	number, _ := strconv.ParseInt(value, 10, 64)
	return number
}

const (
	dayNames   = `(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)`
	longDays   = `(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)`
	monthNames = `(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)`
	clockTime  = `([0-9]{2}):([0-9]{2}):([0-9]{2})`
)

var (
	imfDate = regexp.MustCompile(`^` + dayNames + `, ([0-9]{2}) ` + monthNames + ` ([0-9]{4}) ` + clockTime + ` GMT$`)
	rfc850  = regexp.MustCompile(`^` + longDays + `, ([0-9]{2})-` + monthNames + `-([0-9]{2}) ` + clockTime + ` GMT$`)
	ascTime = regexp.MustCompile(`^` + dayNames + ` ` + monthNames + ` ([0-9]{2}| [0-9]) ` + clockTime + ` ([0-9]{4})$`)
)

func date(value string, now int64) (int64, bool) {
	var day, month, year string
	var clock []string
	number := 0
	if parts := imfDate.FindStringSubmatch(value); parts != nil {
		day, month, year, clock = parts[1], parts[2], parts[3], parts[4:]
		number, _ = strconv.Atoi(year)
	} else if parts := rfc850.FindStringSubmatch(value); parts != nil {
		day, month, year, clock = parts[1], parts[2], parts[3], parts[4:]
		number, _ = strconv.Atoi(year)
		number += 2000
		if number > time.UnixMilli(now).UTC().Year()+50 {
			number -= 100
		}
	} else if parts := ascTime.FindStringSubmatch(value); parts != nil {
		month, day, clock, year = parts[1], strings.TrimSpace(parts[2]), parts[3:6], parts[6]
		number, _ = strconv.Atoi(year)
	} else {
		return 0, false
	}
	at := time.Month(strings.Index("JanFebMarAprMayJunJulAugSepOctNovDec", month)/3 + 1)
	dayNumber, _ := strconv.Atoi(day)
	hour, _ := strconv.Atoi(clock[0])
	minute, _ := strconv.Atoi(clock[1])
	second, _ := strconv.Atoi(clock[2])
	lastDay := time.Date(number, at+1, 0, 0, 0, 0, 0, time.UTC).Day()
	if number < 1 || dayNumber < 1 || dayNumber > lastDay || hour > 23 || minute > 59 || second > 60 {
		return 0, false
	}
	return time.Date(number, at, dayNumber, hour, minute, second, 0, time.UTC).UnixMilli(), true
}

func duration(value string, now int64) int64 {
	if ms := seconds(value); ms >= 0 {
		return ms
	}
	if at, ok := date(value, now); ok {
		return max(0, at-now)
	}
	return -1
}

// split splits outside of quoted strings; nil if a quote is not closed.
func split(value string, separator byte) []string {
	var parts []string
	start, quoted := 0, false
	for at := 0; at < len(value); at++ {
		switch {
		case quoted && value[at] == '\\':
			at++
		case value[at] == '"':
			quoted = !quoted
		case value[at] == separator && !quoted:
			parts = append(parts, strings.Trim(value[start:at], " \t"))
			start = at + 1
		}
	}
	if quoted {
		return nil
	}
	return append(parts, strings.Trim(value[start:], " \t"))
}

func memberName(part string) (string, bool) {
	if strings.HasPrefix(part, `"`) {
		if len(part) < 2 || !strings.HasSuffix(part, `"`) {
			return "", false
		}
		var name strings.Builder
		inner := part[1 : len(part)-1]
		for at := 0; at < len(inner); at++ {
			if inner[at] == '\\' && at+1 < len(inner) {
				at++
			}
			name.WriteByte(inner[at])
		}
		return name.String(), true
	}
	return part, part != "" && !strings.ContainsAny(part, `="`)
}

type parsedMember struct {
	name       string
	parameters map[string]string
}

func parseMembers(value, required string) []parsedMember {
	var found []parsedMember
	if value == "" {
		return nil
	}
	for _, each := range split(value, ',') {
		parts := split(each, ';')
		if len(parts) == 0 {
			continue
		}
		name, ok := memberName(parts[0])
		if !ok {
			continue
		}
		parameters := map[string]string{}
		for _, part := range parts[1:] {
			if key, value, ok := strings.Cut(part, "="); ok {
				parameters[strings.Trim(key, " \t")] = strings.Trim(value, " \t")
			}
		}
		if isDigits(parameters[required], 15) {
			found = append(found, parsedMember{name, parameters})
		}
	}
	return found
}

func ietfMembers(fields map[string]string) []member {
	policies := map[string]int64{}
	for _, policy := range parseMembers(fields["ratelimit-policy"], "q") {
		if _, known := policies[policy.name]; !known {
			policies[policy.name] = count(policy.parameters["q"])
		}
	}
	var members []member
	for _, each := range parseMembers(fields["ratelimit"], "r") {
		found := member{each.name, count(each.parameters["r"]), -1, -1}
		if reset, given := each.parameters["t"]; given {
			if !isDigits(reset, 15) {
				continue
			}
			found.reset = count(reset) * 1000
		}
		if limit, known := policies[each.name]; known {
			found.limit = limit
		}
		members = append(members, found)
	}
	if found, ok := draft7Member(fields["ratelimit"]); ok {
		members = append(members, found)
	}
	return members
}

func draft7Member(value string) (member, bool) {
	figures := map[string]int64{}
	if value != "" {
		for _, each := range split(value, ',') {
			key, figure, ok := strings.Cut(each, "=")
			if ok && (key == "limit" || key == "remaining" || key == "reset") {
				figures[key] = count(figure)
			}
		}
	}
	found := member{"", -1, -1, -1}
	for key, figure := range figures {
		if figure < 0 {
			return found, false
		}
		switch key {
		case "limit":
			found.limit = figure
		case "remaining":
			found.remaining = figure
		default:
			found.reset = figure * 1000
		}
	}
	return found, found.remaining >= 0
}

func legacyMember(fields map[string]string, now int64) (member, bool) {
	for _, prefix := range []string{"ratelimit-", "x-ratelimit-", "x-rate-limit-"} {
		remaining := count(fields[prefix+"remaining"])
		if remaining < 0 {
			continue
		}
		limit := fields[prefix+"limit"]
		if at := strings.IndexAny(limit, ",;"); at >= 0 {
			limit = limit[:at]
		}
		reset := seconds(fields[prefix+"reset-after"])
		if reset < 0 {
			reset = resetOf(fields[prefix+"reset"], now)
		}
		return member{"", remaining, reset, count(strings.Trim(limit, " \t"))}, true
	}
	return member{}, false
}

func resetOf(value string, now int64) int64 {
	ms := seconds(value)
	switch {
	case ms < 0:
		return duration(value, now)
	case ms >= 1_000_000_000_000_000:
		return max(0, (ms+999)/1000-now)
	case ms >= 1_000_000_000_000:
		return max(0, ms-now)
	}
	return ms
}
