// Ages and times as the server writes them (words.py), so that they can go on between two answers.
"use strict";
const Format = (() => {
  const SPACE = "\u00a0";
  const two = (number) => String(number).padStart(2, "0");
  return {
    age(seconds) {
      const whole = Math.max(0, Math.floor(seconds));
      if (whole < 60) return `${whole}${SPACE}s`;
      if (whole < 3600) return `${Math.floor(whole / 60)}${SPACE}min`;
      if (whole < 172800) return `${Math.floor(whole / 3600)}${SPACE}h ${two(Math.floor((whole % 3600) / 60))}${SPACE}min`;
      return `${Math.floor(whole / 86400)}${SPACE}d`;
    },
    clock(seconds) {
      const moment = new Date(seconds * 1000);
      return `${two(moment.getUTCHours())}:${two(moment.getUTCMinutes())}:${two(moment.getUTCSeconds())}`;
    },
    figure(value) {
      return Number(value).toLocaleString("en-US", { maximumSignificantDigits: 4 }).replace("-", "−");
    },
  };
})();
